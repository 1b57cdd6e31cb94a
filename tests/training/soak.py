"""
Long runs of every objective, with NaN thrown into data, gradients and parameters on the way.

What is watched: that each NaN is reported at once, that what an objective keeps from step to step
stays finite, that the next step works, and that neither memory nor the number of tensors grows::

    python -m tests.training.soak --steps 20000 --objectives sis ais
"""

import argparse
import gc
import math
import random
import resource
import tempfile
import time
from pathlib import Path

import pyro
import torch
from pyro.poutine.runtime import _PYRO_STACK
from torch import nn

from pyro_mcvae import load_checkpoint, save_checkpoint
from tests.training.runs import OBJECTIVES, Run

KINDS = "data", "gradients", "parameters"


def alive():
    """How many tensors there are."""
    gc.collect()
    # By type: isinstance asks lazy objects of other modules what they are, which may warn.
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())


def resident():
    """The memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def own_state(run):
    parts = [p for p in (run.loss, run.guide) if isinstance(p, nn.Module)]
    return {n: v for part in parts for n, v in part.state_dict().items()}


def check_sane(run):
    assert not _PYRO_STACK
    for name, value in own_state(run).items():
        assert torch.isfinite(value.double()).all(), name
        if name.startswith("states_"):
            # Every datum's states stay distinct.
            keys = (value.long() * 257 ** torch.arange(value.shape[-1])).sum(-1).sort(-1).values
            assert (keys[:, 1:] != keys[:, :-1]).all()


def reported(run):
    """Take a step that must not go unnoticed; the way in which it was reported."""
    try:
        loss = run.step()
    except (ValueError, RuntimeError) as error:
        if "nan" not in str(error).lower():
            raise
        return type(error).__name__
    assert not math.isfinite(loss), "NaN went unnoticed"
    return "loss"


class Disturbed:
    """A run that something happens to now and then."""

    def __init__(self, name, interface, seed, path):
        self.run, self.random, self.path = Run(name, interface), random.Random(seed), path
        self.reports = {kind: [] for kind in KINDS}

    def params(self):
        run = self.run
        trained = [p for part in (run.model, run.guide) for p in part.parameters()]
        # Not one that the bound does not depend on at the moment: nobody would notice.
        return [p for p in trained if p.requires_grad]

    def data(self):
        kept = self.run.x
        # One value of every datum: whichever the minibatch takes, it has some.
        column = torch.randint(kept.shape[1], (len(kept), 1))
        self.run.x = kept.scatter(1, column, math.nan)
        try:
            report = reported(self.run)
        finally:
            self.run.x = kept
        return report

    def parameters(self):
        save_checkpoint(self.path, self.run.parts)
        with torch.no_grad():
            self.random.choice(self.params()).fill_(math.nan)
        report = reported(self.run)
        load_checkpoint(self.path, self.run.parts)
        return report

    def gradients(self):
        """One gradient is NaN in one step; the user finds a NaN, and goes back."""
        save_checkpoint(self.path, self.run.parts)
        param = self.random.choice(self.params())
        handle = param.register_hook(lambda grad: grad * math.nan)
        try:
            # Without validation a module's gradient is not checked: the step itself may look well.
            self.run.step()
        except (ValueError, RuntimeError) as error:
            report = type(error).__name__  # and nothing is trained on it
        else:
            report = None
        finally:
            handle.remove()
        report = report or reported(self.run)
        load_checkpoint(self.path, self.run.parts)
        return report

    def disturb(self, kind):
        validation = self.random.random() < 0.5
        before = pyro.settings.get()
        pyro.enable_validation(validation)
        # Without validation a torch loop applies the gradient of a NaN loss: it goes back.
        undo = kind == "data" and hasattr(self.run, "optimizer")
        if undo:
            save_checkpoint(self.path, self.run.parts)
        try:
            self.reports[kind].append(getattr(self, kind)())
        finally:
            pyro.settings.set(**before)
        if undo:
            load_checkpoint(self.path, self.run.parts)


def soak(name, interface, steps, seed=0, every=50):
    """
    Run, disturb at random, check.

    :returns: losses, reports, and the number of tensors and the memory over time.
    """
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    # What was there before is not looked through again and again.
    gc.collect()
    gc.freeze()
    with tempfile.TemporaryDirectory() as folder:
        disturbed = Disturbed(name, interface, seed, Path(folder) / "run.pt")
        run, count, when, tensors, memory = disturbed.run, 0, 0, [], []
        for step in range(steps):
            loss = run.step()
            assert math.isfinite(loss), (step, loss)
            if step % every == 0:
                when = step + disturbed.random.randrange(every)
            if step == when:
                disturbed.disturb(KINDS[count % 3])
                count += 1
                check_sane(run)
            if step and step % max(1, steps // 6) == 0:
                tensors.append(alive())
                memory.append(round(resident(), 1))
        check_sane(run)
    gc.unfreeze()
    return {"tensors": tensors, "memory": memory, "disturbed": count, **disturbed.reports}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument("--objectives", nargs="*", default=list(OBJECTIVES))
    parser.add_argument("--interfaces", nargs="*", default=["svi", "module"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    for name in args.objectives:
        for interface in args.interfaces:
            start = time.process_time()
            result = soak(name, interface, args.steps, every=200)
            seconds = time.process_time() - start
            print(
                f"{name:16} {interface:7} {args.steps} steps {seconds:6.0f} s, "
                f"{result['disturbed']} disturbed; tensors {result['tensors'][0]} to "
                f"{result['tensors'][-1]}, memory {result['memory'][0]} "
                f"to {result['memory'][-1]} MB",
                flush=True,
            )


if __name__ == "__main__":
    main()
