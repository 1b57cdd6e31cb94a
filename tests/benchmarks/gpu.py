"""
What only a GPU can show, in fifteen minutes on one H100 or H200.

    python -m tests.benchmarks.gpu --out gpu.json
    python -m tests.benchmarks.gpu --device cpu --small
    python -m tests.benchmarks.gpu --device sim --small      # the simulated device of tests/device
    python -m tests.benchmarks.gpu --table1 --minutes 9 --epochs 10 --data-root data --out table1

Needs torch and pyro-ppl alone, neither pytest nor data. Three parts, each with its share of the
minutes; what is left over goes to the next part:

1. checks: each objective trains, leaves nothing on the CPU, never makes the host wait, has the
   CPU's bounds, and half precision changes them little;
2. speed: steps per second and the most memory of each objective, plain, recorded and as CUDA
   graphs, beside the step by hand and the same by ``torch.compile``. No step reads its loss;
3. one epoch of SIS-5 of table 1 of Thin et al. (2021): their convolutional networks and
   coordinates, 60,000 binary images (random ones), batch 100.

``--table1`` instead trains four models of that table for ``--epochs``, all at once, each in its own
process. The same command continues them. ``--minutes`` does not count the evaluation.

Each result is a line of JSON, written when it is there, so that an interrupted run has shown
something. A failure is a result, and the run goes on.
"""

import argparse
import json
import math
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyro
import torch
from torch import Tensor, nn

from pyro_mcvae import ULA, CompiledELBO, TraceAIS_ELBO, TraceSIS_ELBO
from tests.benchmarks import by_hand as hand
from tests.benchmarks import suite
from tests.benchmarks.suite import Specialization
from tests.benchmarks.vae import VAE

OBJECTIVES = {"SGVB": 1, "IWAE": 10, "SIS": 5, "AIS": 5, "RB": 1}
# What a user gets who passes no kernel, which nobody has written by hand.
DEFAULTS = {"SIS-5, default": lambda: TraceSIS_ELBO(5), "AIS-5, default": lambda: TraceAIS_ELBO(5)}
SHARES = {"checks": 5, "speed": 8, "epoch": 1}
SIDES = ("plain", "by hand", "recorded", "compiled", "CUDA graphs", "by hand, torch.compile")


class Leading(nn.Module):
    """A network of one batch dim, for any number of them."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, z: Tensor) -> Tensor:
        result: Tensor = self.inside(z.reshape(-1, z.shape[-1]))
        return result.reshape(*z.shape[:-1], result.shape[-1])


def networks(case: Specialization) -> VAE:
    """Model and guide of a case; of "paper" the networks of Thin et al. (2021)."""
    vae = VAE(case, stored=False)
    if case.decoder == "paper":
        sys.path.append(str(Path(__file__).parents[2] / "tutorials" / "annealing"))
        from networks import convolutional  # type: ignore[import-not-found]

        vae.encoder, decoder = convolutional(case.latent)
        vae.decoder = Leading(decoder)
    return vae.to(case.device)


def images(case: Specialization, count: int | None = None) -> Tensor:
    made = torch.Generator().manual_seed(0)
    shape = count or case.batch, case.pixels
    return torch.rand(shape, generator=made).bernoulli(generator=made).to(case.device)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# --- Checks ---------------------------------------------------------------------------------------


@contextmanager
def no_waiting(device: str) -> Iterator[None]:
    """
    :raises RuntimeError: if the host waits for the device within.
    """
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    elif device == "sim":
        from tests.device.simulated import host_reads

        with host_reads() as reads:
            yield
        if reads:
            raise RuntimeError(f"the host has read {len(reads)} numbers: {reads[0]}")
    else:
        yield


def bounds(loss: Any, vae: VAE, x: Tensor, count: int = 30) -> Tensor:
    """The bound of each of several steps, per datum."""
    result = [loss.bounds(vae.model, vae.guide, x).total for _ in range(count)]
    return torch.stack(result).cpu().double() / len(x)


def check(case: Specialization, make: Callable[[], Any]) -> dict[str, Any]:
    """
    A few steps of one objective.

    :raises AssertionError: naming what is wrong.
    """
    vae, x, loss = networks(case), images(case), make()
    step = gradient_step(partial(loss.differentiable_loss, vae.model, vae.guide, x), vae, loss)
    for _ in range(4):  # some of these steps are analyzed
        step()
    with no_waiting(case.device):
        step()
    own = [*loss.parameters(), *loss.buffers()] if isinstance(loss, nn.Module) else []
    for tensor in [*vae.parameters(), *own]:
        assert tensor.device.type == case.device, "a parameter has stayed on another device"
        assert bool(tensor.isfinite().all()), "a parameter is not finite"
    here = bounds(loss, vae, x)
    vae.to("cpu")
    there = bounds(loss, vae, x.to("cpu"))
    error = float((here.var() + there.var()).div(len(here)).sqrt())
    apart = abs(float(here.mean() - there.mean()))
    assert apart <= 5 * error + 1e-3, f"bounds differ by {apart:.4g}, with error {error:.2g}"
    vae.to(case.device)
    result = {"bound": float(here.mean()), "of the CPU": float(there.mean())}
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(case.device, dtype=dtype):
            half = bounds(loss, vae, x)
        result[str(dtype)] = float(half.mean())
        apart = abs(float(half.mean() - here.mean()))
        assert apart <= 5 * error + 5e-3 * abs(float(here.mean())), f"{dtype}: {apart:.4g} apart"
    return result


# --- Speed ----------------------------------------------------------------------------------------


def gradient_step(loss: Callable[[], Tensor], *modules: Any) -> Callable[[], Tensor]:
    """A training step that reads nothing."""
    result = [list(m.parameters()) for m in modules if isinstance(m, nn.Module)]
    optimizer = torch.optim.Adam([p for part in result for p in part], lr=1e-3)

    def step() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return value

    return step


def side(name: str, case: Specialization, make: Callable[[], Any]) -> Callable[[], Tensor]:
    """One way to train: the plain loss, recorded, compiled, or by hand."""
    vae, x = networks(case), images(case)
    if name.startswith("by hand"):
        way = hand.Categories if vae.discrete else hand.Plain
        bound = suite.by_hand(case)

        def step() -> Tensor:
            return -bound(way(vae), x)

        return gradient_step(torch.compile(step) if "compile" in name else step, vae)
    plain = make()
    options: dict[str, Any] = {
        "recorded": {"backend": "eager"},
        "compiled": {},
        "CUDA graphs": {"mode": "reduce-overhead"},
    }
    loss = CompiledELBO(plain, **options[name]) if name in options else plain
    return gradient_step(partial(loss.differentiable_loss, vae.model, vae.guide, x), vae, plain)


def speed(step: Callable[[], Tensor], device: str, seconds: float, warm: int) -> dict[str, float]:
    """Steps per second, and the most gigabytes."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for _ in range(warm):
        value = step()
    synchronize(device)
    first = time.perf_counter() - began
    began, count = time.perf_counter(), 0
    while count < 3 or time.perf_counter() - began < seconds:
        for _ in range(3):
            value = step()
        count += 3
        synchronize(device)
    rate = count / (time.perf_counter() - began)
    loss = float(value.detach())
    assert math.isfinite(loss), f"the loss is {loss}"
    result = {"steps per second": rate, "first seconds": first, "loss": loss}
    if device == "cuda":
        result["gigabytes"] = torch.cuda.max_memory_allocated() / 2**30
    return result


def cases(device: str, small: bool) -> Iterator[tuple[str, Specialization]]:
    """The networks: those of most interest first."""
    sizes = {"latent": 4, "pixels": 16, "hidden": 8} if small else {}
    batches = (5, 10) if small else (100, 1000)
    for decoder, batch in (("mlp", batches[0]), ("paper", batches[0]), ("mlp", batches[1])):
        for objective, size in OBJECTIVES.items():
            if decoder == "paper" and objective == "RB":
                continue
            given = {"latent": 4} if small and decoder == "paper" else dict(sizes)
            if objective == "RB":
                given["latent"] = 10
            case = Specialization(objective, size, batch, decoder=decoder, device=device, **given)
            yield f"{objective}-{size}, {decoder}, batch {batch}", case
    for name in DEFAULTS:
        yield (
            f"{name}, mlp, batch {batches[0]}",
            Specialization(name, 5, batches[0], device=device, **sizes),
        )


def made(case: Specialization) -> Callable[[], Any]:
    return DEFAULTS.get(case.objective) or partial(suite.objective, case)


# --- One epoch ------------------------------------------------------------------------------------


def epoch(device: str, small: bool) -> dict[str, float]:
    """Seconds of an epoch of table 1's SIS-5."""
    case = Specialization("SIS", 5, 10 if small else 100, decoder="paper", device=device)
    vae, data = networks(case), images(case, 30 if small else 60_000)
    loss = TraceSIS_ELBO(5, ULA(), coordinates="latent")
    batch: list[Tensor] = []
    step = gradient_step(
        lambda: loss.differentiable_loss(vae.model, vae.guide, batch[0]), vae, loss
    )
    total, began = torch.zeros((), device=device), time.perf_counter()
    for rows in torch.randperm(len(data), device=device).split(case.batch):
        batch[:] = [data[rows]]
        total = total + step().detach()
    synchronize(device)
    return {"seconds": time.perf_counter() - began, "mean loss": float(total) / len(data)}


# --- Table 1 --------------------------------------------------------------------------------------

TABLE_1 = "ELBO", "IWAE-10", "SIS-5-ULA-latent", "AIS-5"


def table_1(args: argparse.Namespace) -> None:
    """Train the models of table 1, or continue them, and write the table to ``args.out``."""
    script = Path(__file__).parents[2] / "tutorials" / "annealing" / "mnist.py"
    flags = ["--paper", "--compiled", "--seeds", "0", "--device", args.device]
    flags += ["--data-root", str(args.data_root), "--epochs", str(args.epochs)]
    flags += ["--out", str(args.out), *(["--limit", "500"] if args.small else [])]
    flags += ["--test-images", "50" if args.small else "10000", "--checkpoints", "1"]
    command = [sys.executable, str(script), *flags, "--minutes", str(args.minutes)]
    running = [subprocess.Popen([*command, "--objectives", name]) for name in TABLE_1]
    failed = [name for name, one in zip(TABLE_1, running, strict=True) if one.wait()]
    done = [name for name in TABLE_1 if name not in failed]
    print(f"not finished: {', '.join(failed) or 'none'}", flush=True)
    if done:  # each process has written a table of its own objective
        subprocess.run([*command, "--objectives", ",".join(done)], check=True)


# --- All of it ------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu", "sim"])
    parser.add_argument("--small", action="store_true", help="small networks, few steps")
    parser.add_argument("--minutes", type=float, default=14.0, help="for everything")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--sides", default="|".join(SIDES), help="of the speed, split by |")
    parser.add_argument("--out", type=Path, help="a file for the lines of JSON")
    parser.add_argument("--table1", action="store_true", help="train the models of table 1 instead")
    parser.add_argument("--epochs", type=int, default=30, help="of table 1")
    parser.add_argument("--data-root", type=Path, default=Path("data"), help="of table 1")
    args = parser.parse_args(argv)
    if args.table1:
        args.out = args.out or Path("table1")
        table_1(args)
        return []
    seconds = 0.05 if args.small else args.seconds
    sides = [s for s in args.sides.split("|") if args.device == "cuda" or s != "CUDA graphs"]
    end, rows = time.perf_counter() + 60 * args.minutes, list[dict[str, Any]]()

    def report(part: str, name: str, run: Callable[[], dict[str, Any]]) -> None:
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        try:
            result = run()
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"[:500]}
        rows.append({"part": part, "name": name, **result})
        line = json.dumps(rows[-1])
        print(line, flush=True)
        if args.out is not None:
            with args.out.open("a") as file:
                file.write(line + "\n")

    with ExitStack() as stack:
        if args.device == "sim":
            from tests.device.simulated import simulated_device

            stack.enter_context(simulated_device())
        stack.enter_context(pyro.validation_enabled(False))
        device = torch.cuda.get_device_name() if args.device == "cuda" else args.device
        about = {"device": device, "torch": torch.__version__, "python": platform.python_version()}
        report("about", "versions", lambda: {**about, "pyro": pyro.__version__})

        def todo(part: str) -> Iterator[tuple[str, Specialization]]:
            """The cases of a part, while its share of the minutes lasts."""
            parts = list(SHARES)
            after = sum(SHARES[p] for p in parts[parts.index(part) + 1 :])
            last = end - 60 * args.minutes * after / sum(SHARES.values())
            for name, case in cases(args.device, args.small):
                if time.perf_counter() < last:
                    yield name, case
                else:
                    report(part, name, lambda: {"skipped": "no time left"})

        for name, case in todo("checks"):
            if case.batch < 1000:
                report("checks", name, partial(check, case, made(case)))
        for name, case in todo("speed"):
            for one in sides:
                if one.startswith("by hand") and case.objective in DEFAULTS:
                    continue
                warm = 3 if one in ("plain", "by hand") or args.small else 30

                def measure(
                    case: Specialization = case, one: str = one, warm: int = warm
                ) -> dict[str, Any]:
                    return speed(side(one, case, made(case)), args.device, seconds, warm)

                report("speed", f"{name}: {one}", measure)
        report("epoch", "SIS-5 of table 1", partial(epoch, args.device, args.small))
    failed = [row["name"] for row in rows if "error" in row]
    print(f"{len(rows)} results, {len(failed)} failures: {', '.join(failed) or 'none'}")
    return rows


if __name__ == "__main__":
    main()
