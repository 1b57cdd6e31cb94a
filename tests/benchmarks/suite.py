"""The cases of the benchmark: each objective beside a hand-written step and Pyro's nearest loss."""

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import pyro
import pyro.optim
import torch
from pyro.infer import (
    SVI,
    RenyiELBO,
    Trace_ELBO,
    TraceEnum_ELBO,
    TraceMeanField_ELBO,
    config_enumerate,
)
from torch import Tensor, nn

from pyro_mcvae import (
    MALA,
    ULA,
    CompiledELBO,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
)
from tests.benchmarks import by_hand as hand
from tests.benchmarks import truncated_sides, volatility
from tests.benchmarks.memory import peak
from tests.benchmarks.vae import PIXELS, VAE

Step = Callable[[], Any]
# Steps of a compiled side that are not counted: it records and compiles, and compares often.
_WARMUP = 20
_COMPILED = ("replay", "Inductor", "CUDA graphs")
# Which quotients of times the table has.
RATIOS = [
    ("SVI", "by hand"),
    ("module", "by hand"),
    ("bare Pyro", "by hand"),
    ("SVI", "Pyro's"),
    ("SVI", "least"),
    ("replay", "by hand"),
    ("Inductor", "by hand"),
    ("replay", "SVI"),
    ("Inductor", "SVI"),
    ("Inductor", "AutoDAIS"),
    ("CUDA graphs", "by hand"),
]


@dataclass(frozen=True)
class Specialization:
    """One row: an objective at one size."""

    objective: str
    size: int = 1  # K: importance samples, steps of a chain, summed categories, or states
    batch: int = 100
    latent: int = 64
    pixels: int = PIXELS
    hidden: int = 400
    decoder: str = "mlp"
    device: str = "cpu"
    validation: bool = False

    @property
    def name(self) -> str:
        """The objective, and what differs from its other rows."""
        names = {
            "RB": "Rao-Blackwell, k = {}",
            "Truncated": "Truncated, {} states",
            "SGVB": "SGVB",
            "Volatility": "SIS-{}, stochastic volatility",
        }
        name = names.get(self.objective, f"{self.objective}-{{}}").format(self.size)
        usual = Specialization("", latent=10) if self.objective == "RB" else Specialization("")
        fields = ("batch", "latent", "pixels", "hidden")
        sizes = {n: (getattr(self, n), getattr(usual, n)) for n in fields}
        parts = [f"{n} {now}" for n, (now, before) in sizes.items() if now != before]
        parts += ["convolutions"] * (self.decoder == "conv") + ["validation"] * self.validation
        return "; ".join([name, ", ".join(parts)] if parts else [name])


def cases(device: str, quick: bool = False, compiled: bool = False) -> Iterator[Specialization]:
    """
    Every objective at one size, and each size varied by itself.

    :param compiled: also short steps, which are mostly Python.
    """
    sizes = {"SGVB": (1,), "IWAE": (5, 10, 50), "SIS": (3, 5, 10), "AIS": (3, 5, 10)}
    for objective, several in sizes.items():
        middle = several[len(several) // 2]
        case = partial(Specialization, objective, device=device)
        yield case(middle)
        if quick:
            continue
        yield case(middle, validation=True)
        yield from (case(size) for size in several if size != middle)
        yield from (case(middle, batch=batch) for batch in (20, 500))
        yield case(middle, latent=8)
        yield case(middle, decoder="conv")
    others = [partial(Specialization, "RB", latent=10, device=device)]
    if device == "cpu":  # what it is compared with runs there
        others.append(partial(Specialization, "Truncated", 64))
    for case in others:
        yield case()
        if not quick:
            yield case(validation=True)
            yield from (case(batch=batch) for batch in (20, 500))
    if compiled:
        yield Specialization("SIS", 5, latent=16, pixels=64, hidden=200, device=device)
    if compiled and device == "cpu":
        yield Specialization("Volatility", 10)


def objective(case: Specialization) -> Any:
    many: dict[str, Any] = {"vectorize_particles": True, "max_plate_nesting": 1}
    return {
        "SGVB": lambda: TraceSGVB_ELBO(max_plate_nesting=1),
        "IWAE": lambda: TraceIWAE_ELBO(case.size, **many),
        "SIS": lambda: TraceSIS_ELBO(case.size, ULA(0.05), max_plate_nesting=1),
        "AIS": lambda: TraceAIS_ELBO(case.size, MALA(0.05), **many),
        "RB": lambda: TraceRaoBlackwell_ELBO(case.size, max_plate_nesting=1),
    }[case.objective]()


def nearest(case: Specialization) -> Any:
    """Pyro's loss that comes closest; chains have none, and stand beside the plain ELBO."""
    if case.objective == "RB":
        return TraceEnum_ELBO(max_plate_nesting=1)  # the exact sum
    many: dict[str, Any] = {"vectorize_particles": True, "max_plate_nesting": 1}
    if case.objective == "SGVB":
        return TraceMeanField_ELBO()
    return RenyiELBO(0, case.size, **many) if case.objective == "IWAE" else Trace_ELBO()


def by_hand(case: Specialization) -> Callable[[hand.Plain, Tensor], Tensor]:
    """The bound in plain PyTorch."""
    return {
        "SGVB": hand.sgvb,
        "IWAE": partial(hand.iwae, num_particles=case.size),
        "SIS": partial(hand.sis, num_steps=case.size),
        "AIS": partial(hand.ais, num_steps=case.size),
        "RB": partial(hand.rao_blackwell, num_categories=case.size),
    }[case.objective]


def svi_step(case: Specialization, loss: Any, x: Tensor) -> Step:
    vae = VAE(case)
    guide = config_enumerate(vae.guide) if isinstance(loss, TraceEnum_ELBO) else vae.guide
    svi = SVI(vae.model, guide, pyro.optim.Adam({"lr": 1e-3}), loss=loss)
    return lambda: svi.step(x)


def plain_step(case: Specialization, x: Tensor, way: type[hand.Plain] = hand.Plain) -> Step:
    vae = VAE(case, stored=False)
    if vae.discrete:
        way = {hand.Plain: hand.Categories, hand.Bare: hand.BareCategories}[way]
    step: Step = hand.step(vae, by_hand(case), x, way)
    return step


def module_step(case: Specialization, x: Tensor) -> Step:
    """``elbo(model, guide)`` with an optimizer of PyTorch."""
    vae = VAE(case, stored=False)
    module = objective(case)(vae.model, vae.guide)
    if isinstance(module.elbo, nn.Module):
        module.elbo.to(case.device)
    optimizer = torch.optim.Adam(vae.parameters(), lr=1e-3)

    def step() -> float:
        optimizer.zero_grad()
        loss = module(x)
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return step


def least_step(
    case: Specialization, x: Tensor, backward: bool = True, gradients: bool = True
) -> Step:
    """
    The networks alone, as often as the algorithm needs them: no densities, no optimizer.

    SGVB and IWAE run the decoder forward and backward; chains also differentiate its gradient, once
    for each state.
    """
    vae = VAE(case, stored=False)
    particles = {"IWAE": case.size, "AIS": 2, "RB": case.size + 1}.get(case.objective, 1)
    states = {"SIS": case.size + 1, "AIS": case.size}.get(case.objective, 0)

    def step() -> None:
        z = vae.encoder(x)[..., : vae.latent].expand(particles, -1, -1)
        total: Any = 0.0
        for _ in range(max(states, 1)):
            out = vae.decoder(z).square().sum()
            total = total + out
            if states and gradients:
                (gradient,) = torch.autograd.grad(out, z, create_graph=True)
                z = z + 1e-3 * gradient
        if backward:
            (total + z.sum()).backward()
        for p in vae.parameters():
            p.grad = None

    return step


def medians(
    steps: dict[str, Step], count: int, device: str, limit: float = math.inf
) -> dict[str, float]:
    """
    Milliseconds of each, which take turns in random order.

    :param limit: seconds after which eight turns are enough.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    clock = time.process_time if device == "cpu" else time.perf_counter
    order, begin = random.Random(0), clock()
    for i in range(count + 5):
        for name in order.sample(list(steps), len(steps)):
            start = clock()
            steps[name]()
            if device != "cpu":
                torch.cuda.synchronize()
            times[name].append(1e3 * (clock() - start))
        if i >= 12 and clock() - begin > limit:
            break
    return {name: statistics.median(result[5:] or result) for name, result in times.items()}


def sides(case: Specialization, compiled: bool = False) -> dict[str, Callable[[], Step]]:
    """What is measured, the objective under SVI first."""
    if case.objective == "Truncated":
        return truncated_sides.sides(case)
    if case.objective == "Volatility":
        return volatility.sides(case, compiled)
    torch.manual_seed(0)
    x = torch.rand(case.batch, case.pixels).bernoulli().to(case.device)
    result = {
        "SVI": lambda: svi_step(case, objective(case), x),
        "module": lambda: module_step(case, x),
        "by hand": lambda: plain_step(case, x),
        "bare Pyro": lambda: plain_step(case, x, hand.Bare),
        "Pyro's": lambda: svi_step(case, nearest(case), x),
        "least": lambda: least_step(case, x),
    }
    if compiled:
        for name, backend in {"replay": "eager", "Inductor": "inductor"}.items():
            result[name] = lambda b=backend: svi_step(case, CompiledELBO(objective(case), b), x)
    if compiled and case.device != "cpu":
        loss = partial(CompiledELBO, mode="reduce-overhead")
        result["CUDA graphs"] = lambda: svi_step(case, loss(objective(case)), x)
    return result


def run(
    case: Specialization, count: int, limit: float = math.inf, compiled: bool = False
) -> dict[str, Any]:
    """Times, ratios and memory of one case."""
    pyro.enable_validation(case.validation)
    pyro.clear_param_store()
    made = sides(case, compiled)
    # On the CPU each side's first steps; a CUDA device frees what other sides have cached.
    counted = {"SVI", "module", "by hand"} & made.keys()
    megabytes = {n: peak(made[n], case.device) for n in counted}
    pyro.clear_param_store()
    steps = {n: make() for n, make in made.items()}
    for name in steps.keys() & {*_COMPILED}:
        for _ in range(_WARMUP):
            steps[name]()
    result = medians(steps, count, case.device, limit)
    ratios = {f"{a} / {b}": result[a] / result[b] for a, b in RATIOS if {a, b} <= result.keys()}
    for side in sorted(counted - {"by hand"}):
        ratios[f"memory: {side} / by hand"] = megabytes[side] / megabytes["by hand"]
    about = {**asdict(case), "name": case.name}
    return {**about, "milliseconds": result, "megabytes": megabytes, "ratios": ratios}
