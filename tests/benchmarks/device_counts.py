"""
What a device has to do with a step, counted without one: the numbers that the host reads of it, on
the simulated device of ``tests/device``, and the operations that are launched.

    python -m tests.benchmarks.device_counts
"""

import pyro
import torch
from pyro.infer import Trace_ELBO

from tests.device import test_operations, test_reads
from tests.device.programs import Training
from tests.device.simulated import simulated_device

COLUMNS = (
    *("by formulas", "programs alone", "by distributions"),
    *("plain, CPU", "recorded, CPU", "plain, device", "recorded, device"),
)


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
        print(f"\n| step | {' | '.join(COLUMNS)} |\n| --- " + "| ---: " * len(COLUMNS) + "|")
        for name in test_operations.CASES:
            found = []
            for place in (torch.device("cpu"), device):
                pyro.set_rng_seed(0)
                found.append(test_operations.counts(name, place))
            n = found[0].distributions
            ratios = [f"{c / n:.2f}" for f in found for c in (f.plain, f.recorded)]
            parts = [found[0].formulas, found[0].programs, n, *ratios]
            print(f"| {name} | {' | '.join(map(str, parts))} |", flush=True)


if __name__ == "__main__":
    main()
