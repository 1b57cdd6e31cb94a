"""
One script of this folder on several processes, which share one start of the interpreter.

``python tests/training/forked.py NAME NUM_RANKS OUT`` does what torchrun does with
``tests/training/NAME.py OUT``, in less time: torch and Pyro are imported once.
"""

import importlib
import os
import signal
import sys
import traceback

import torch._dynamo  # noqa: F401  the first optimizer would import it, in each process


def rank(module, number, num_ranks, out):
    os.environ.update(RANK=str(number), WORLD_SIZE=str(num_ranks))
    try:
        module.main(out)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main(name, num_ranks, out):
    module = importlib.import_module(f"tests.training.{name}")
    running = set()
    for number in range(int(num_ranks)):
        child = os.fork()
        if child == 0:
            rank(module, number, num_ranks, out)
        running.add(child)
    while running:
        child, status = os.wait()
        running.remove(child)
        if status:  # the others would wait for it
            for other in running:
                os.kill(other, signal.SIGKILL)
            sys.exit(f"a rank failed with status {status}")


if __name__ == "__main__":
    main(*sys.argv[1:])
