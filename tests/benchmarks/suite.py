"""The cases of the benchmark: each objective beside a hand-written step and Pyro's nearest loss."""

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pyro.optim
import torch
from pyro.infer import SVI, RenyiELBO, Trace_ELBO, TraceMeanField_ELBO
from torch import Tensor, nn

from pyro_mcvae import (
    MALA,
    ULA,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
    capture,
)
from tests.benchmarks import by_hand as hand
from tests.benchmarks.memory import peak

Step = Callable[[], Any]
PIXELS = 784
# Which quotients of times the table has.
RATIOS = [
    ("SVI", "by hand"),
    ("module", "by hand"),
    ("bare Pyro", "by hand"),
    ("SVI", "Pyro's"),
    ("SVI", "least"),
]
_counter = itertools.count()


@dataclass(frozen=True)
class Case:
    """One row: an objective at one size."""

    objective: str
    size: int = 1  # K: importance samples, or steps of a chain
    batch: int = 100
    latent: int = 64
    decoder: str = "mlp"
    device: str = "cpu"
    validation: bool = False

    @property
    def name(self) -> str:
        size = f"-{self.size}" if self.objective != "SGVB" else ""
        checks = ", validation" if self.validation else ""
        return (
            f"{self.objective}{size}, batch {self.batch}, latent {self.latent}, {self.decoder}, "
            f"{self.device}{checks}"
        )


def cases(device: str, quick: bool = False) -> Iterator[Case]:
    """Every objective at one size, and each size varied by itself."""
    sizes = {"SGVB": (1,), "IWAE": (5, 10, 50), "SIS": (3, 5, 10), "AIS": (3, 5, 10)}
    for objective, several in sizes.items():
        middle = several[len(several) // 2]
        case = partial(Case, objective, device=device)
        yield case(middle)
        if quick:
            continue
        yield case(middle, validation=True)
        yield from (case(size) for size in several if size != middle)
        yield from (case(middle, batch=batch) for batch in (20, 500))
        yield case(middle, latent=8)
        yield case(middle, decoder="conv")


class ConvDecoder(nn.Module):
    """Upsampling stages of Thin et al. (2021), for any leading dims."""

    def __init__(self, latent: int) -> None:
        super().__init__()
        self.first = nn.Linear(latent, 64 * 7 * 7)
        self.stages = nn.Sequential(
            nn.Upsample(scale_factor=2),
            nn.Conv2d(64, 32, 3, padding=1),
            nn.GELU(),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(32, 16, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(16, 1, 1),
        )

    def forward(self, z: Tensor) -> Tensor:
        found = self.stages(self.first(z).reshape(-1, 64, 7, 7))
        return found.reshape(*z.shape[:-1], PIXELS)


class VAE(nn.Module):
    """
    :param bool stored: whether the programs register the networks in Pyro's parameter store, which
        SVI trains and a module does without.
    """

    def __init__(self, case: Case, stored: bool = True) -> None:
        super().__init__()
        self.name, self.latent, self.stored = f"suite{next(_counter)}", case.latent, stored
        self.encoder = nn.Sequential(
            nn.Linear(PIXELS, 400), nn.Tanh(), nn.Linear(400, 2 * case.latent)
        )
        self.decoder = (
            ConvDecoder(case.latent)
            if case.decoder == "conv"
            else nn.Sequential(nn.Linear(case.latent, 400), nn.Tanh(), nn.Linear(400, PIXELS))
        )
        self.to(case.device)

    def model(self, x: Tensor) -> None:
        if self.stored:
            pyro.module(self.name + ".decoder", self.decoder)
        with pyro.plate("data", len(x)):
            prior = dist.Normal(x.new_zeros(self.latent), x.new_ones(self.latent)).to_event(1)
            z = pyro.sample("z", prior)
            pyro.sample("x", dist.Bernoulli(logits=self.decoder(z)).to_event(1), obs=x)

    def guide(self, x: Tensor) -> None:
        if self.stored:
            pyro.module(self.name + ".encoder", self.encoder)
        with pyro.plate("data", len(x)):
            loc, log_scale = self.encoder(x).chunk(2, -1)
            pyro.sample("z", dist.Normal(loc, log_scale.exp()).to_event(1))


def objective(case: Case) -> Any:
    many: dict[str, Any] = {"vectorize_particles": True, "max_plate_nesting": 1}
    return {
        "SGVB": lambda: TraceSGVB_ELBO(max_plate_nesting=1),
        "IWAE": lambda: TraceIWAE_ELBO(case.size, **many),
        "SIS": lambda: TraceSIS_ELBO(case.size, ULA(0.05), max_plate_nesting=1),
        "AIS": lambda: TraceAIS_ELBO(case.size, MALA(0.05), **many),
    }[case.objective]()


def nearest(case: Case) -> Any:
    """Pyro's loss that comes closest; chains have none, and stand beside the plain ELBO."""
    many: dict[str, Any] = {"vectorize_particles": True, "max_plate_nesting": 1}
    if case.objective == "SGVB":
        return TraceMeanField_ELBO()
    return RenyiELBO(0, case.size, **many) if case.objective == "IWAE" else Trace_ELBO()


def by_hand(case: Case) -> Callable[[hand.Plain, Tensor], Tensor]:
    """The bound in plain PyTorch."""
    return {
        "SGVB": hand.sgvb,
        "IWAE": partial(hand.iwae, num_particles=case.size),
        "SIS": partial(hand.sis, num_steps=case.size),
        "AIS": partial(hand.ais, num_steps=case.size),
    }[case.objective]


def svi_step(case: Case, loss: Any, x: Tensor) -> Step:
    vae = VAE(case)
    svi = SVI(vae.model, vae.guide, pyro.optim.Adam({"lr": 1e-3}), loss=loss)
    return lambda: svi.step(x)


def plain_step(case: Case, x: Tensor, way: type[hand.Plain] = hand.Plain) -> Step:
    step: Step = hand.step(VAE(case, stored=False), by_hand(case), x, way)
    return step


def module_step(case: Case, x: Tensor) -> Step:
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


def captured_step(case: Case, x: Tensor) -> Step:
    """On CUDA only: the whole step as one graph."""
    vae = VAE(case, stored=False)
    module = objective(case)(vae.model, vae.guide)
    module.vae = vae  # its parameters, for the module's own
    if isinstance(module.elbo, nn.Module):
        module.elbo.to(case.device)
    optimizer = torch.optim.Adam(vae.parameters(), lr=1e-3, capturable=True)
    step = capture(module, optimizer, x)
    return lambda: step(x).item()


def least_step(case: Case, x: Tensor, backward: bool = True, gradients: bool = True) -> Step:
    """
    The networks alone, as often as the algorithm needs them: no densities, no optimizer.

    SGVB and IWAE run the decoder forward and backward; chains also differentiate its gradient, once
    for each state.
    """
    vae = VAE(case, stored=False)
    particles = {"IWAE": case.size, "AIS": 2}.get(case.objective, 1)
    states = {"SIS": case.size + 1, "AIS": case.size}.get(case.objective, 0)

    def step() -> None:
        z = vae.encoder(x).chunk(2, -1)[0].expand(particles, -1, -1)
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
    return {name: statistics.median(found[5:] or found) for name, found in times.items()}


def sides(case: Case) -> dict[str, Callable[[], Step]]:
    """What is measured, the objective under SVI first."""
    torch.manual_seed(0)
    x = torch.rand(case.batch, PIXELS).bernoulli().to(case.device)
    found = {
        "SVI": lambda: svi_step(case, objective(case), x),
        "module": lambda: module_step(case, x),
        "by hand": lambda: plain_step(case, x),
        "bare Pyro": lambda: plain_step(case, x, hand.Bare),
        "Pyro's": lambda: svi_step(case, nearest(case), x),
        "least": lambda: least_step(case, x),
    }
    if case.device != "cpu":
        found["captured"] = lambda: captured_step(case, x)
    return found


def run(case: Case, count: int, limit: float = math.inf) -> dict[str, Any]:
    """Times, ratios and memory of one case."""
    pyro.enable_validation(case.validation)
    pyro.clear_param_store()
    made = sides(case)
    # On the CPU each side's first steps; a CUDA device frees what other sides have cached.
    megabytes = {n: peak(make, case.device) for n, make in made.items()}
    pyro.clear_param_store()
    found = medians({n: make() for n, make in made.items()}, count, case.device, limit)
    ratios = {f"{a} / {b}": found[a] / found[b] for a, b in RATIOS}
    ratios["memory"] = megabytes["SVI"] / megabytes["by hand"]
    about = {**asdict(case), "name": case.name}
    return {**about, "milliseconds": found, "megabytes": megabytes, "ratios": ratios}
