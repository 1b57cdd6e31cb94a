"""
What a device has to do with a step, counted without one: the numbers that the host reads of it, on
the simulated device of ``tests/device``, and the operations that are launched.

    python -m tests.benchmarks.device_counts
"""

import pyro
from pyro.infer import Trace_ELBO

from tests.device import test_operations, test_reads
from tests.device.programs import Training
from tests.device.simulated import simulated_device


def main() -> None:
    print("| loss | model and guide | reads, validation on | off | `Trace_ELBO`, on | off |")
    print("| --- | --- " + "| ---: " * 4 + "|")
    with simulated_device() as device:

        def reads(loss, programs):
            pyro.clear_param_store()
            training, result = Training(loss, programs, device), []
            for validation in (True, False):
                pyro.enable_validation(validation)
                result.append(len(training.reads(steps=7)))
            return result

        beside = {}
        for name, (loss, programs) in test_reads.CASES.items():
            drawn = "slots" if programs == "enumerated" else programs
            if drawn not in beside:
                beside[drawn] = reads(Trace_ELBO(), drawn)
            counts = map(str, (*reads(loss(), programs), *beside[drawn]))
            print(f"| {name} | {programs} | {' | '.join(counts)} |", flush=True)
    print("\n| step | by hand | plain | recorded | programs alone | plain | recorded |")
    print("| --- " + "| ---: " * 6 + "|")
    for name in test_operations.CASES:
        pyro.set_rng_seed(0)
        plain, recorded, *steps = test_operations.counts(name)
        parts = (f"{n} | {plain / n:.2f} | {recorded / n:.2f}" for n in steps)
        print(f"| {name} | {' | '.join(parts)} |", flush=True)


if __name__ == "__main__":
    main()
