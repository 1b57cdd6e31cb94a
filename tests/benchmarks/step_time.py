"""Time one training step of each objective beside Pyro's nearest loss and a step without Pyro.

A 784-400-64 VAE, batch 100. The two sides of a row take turns in one process, and the ratio is of
their medians. Run it on a machine that does nothing else::

    python tests/benchmarks/step_time.py --threads 1 --steps 60
"""

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, RenyiELBO, Trace_ELBO, TraceMeanField_ELBO
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from pyro_mcvae import (
    MALA,
    ULA,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
)

Step = Callable[[], Any]


class VAE(nn.Module):
    count = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        # Of its own: modules that share names in the store are copied at every step.
        self.name = f"vae{next(self.count)}"
        self.encoder = nn.Sequential(nn.Linear(784, 400), nn.Tanh(), nn.Linear(400, 128))
        self.decoder = nn.Sequential(nn.Linear(64, 400), nn.Tanh(), nn.Linear(400, 784))

    def model(self, x: Tensor) -> None:
        pyro.module(self.name + ".decoder", self.decoder)
        with pyro.plate("data", len(x)):
            prior = dist.Normal(x.new_zeros(64), x.new_ones(64)).to_event(1)
            z = pyro.sample("z", prior)
            pyro.sample("x", dist.Bernoulli(logits=self.decoder(z)).to_event(1), obs=x)

    def guide(self, x: Tensor) -> None:
        pyro.module(self.name + ".encoder", self.encoder)
        with pyro.plate("data", len(x)):
            loc, log_scale = self.encoder(x).chunk(2, -1)
            pyro.sample("z", dist.Normal(loc, log_scale.exp()).to_event(1))


def with_pyro(loss: Any, x: Tensor) -> Step:
    vae = VAE()
    svi = SVI(vae.model, vae.guide, pyro.optim.Adam({"lr": 1e-3}), loss=loss)
    return lambda: svi.step(x)


def by_hand(bound: Callable[[VAE, Tensor], Tensor], x: Tensor) -> Step:
    vae = VAE()
    optimizer = torch.optim.Adam(vae.parameters(), lr=1e-3)

    def step() -> float:
        optimizer.zero_grad()
        loss = -bound(vae, x)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def sgvb(vae: VAE, x: Tensor) -> Tensor:
    loc, log_scale = vae.encoder(x).chunk(2, -1)
    z = loc + log_scale.exp() * torch.randn_like(loc)
    kl = 0.5 * (loc**2 + (2 * log_scale).exp() - 1) - log_scale
    return -binary_cross_entropy_with_logits(vae.decoder(z), x, reduction="sum") - kl.sum()


def iwae(vae: VAE, x: Tensor, num_particles: int = 10) -> Tensor:
    loc, log_scale = vae.encoder(x).chunk(2, -1)
    eps = torch.randn(num_particles, *loc.shape)
    z = loc + log_scale.exp() * eps
    logits = vae.decoder(z)
    likelihood = -binary_cross_entropy_with_logits(logits, x.expand_as(logits), reduction="none")
    log_ratio = -0.5 * z**2 + 0.5 * eps**2 + log_scale
    log_weight = likelihood.sum(-1) + log_ratio.sum(-1)
    return (log_weight.logsumexp(0) - math.log(num_particles)).sum()


def evaluate(vae: VAE, x: Tensor, guide: tuple[Tensor, Tensor], eps: Tensor) -> tuple[Tensor, ...]:
    """log base, log w and the latter's gradient at one state of a chain."""
    loc, log_scale = guide
    logits = vae.decoder(z := loc + log_scale.exp() * eps)
    likelihood = -binary_cross_entropy_with_logits(logits, x.expand_as(logits), reduction="none")
    log_base = -0.5 * eps.square().sum(-1)
    log_weight = likelihood.sum(-1) - 0.5 * z.square().sum(-1) - log_base + log_scale.sum(-1)
    (gradient,) = torch.autograd.grad(log_weight.sum(), eps, create_graph=True)
    return log_base, log_weight, gradient


def sis(vae: VAE, x: Tensor, num_steps: int = 5, eta: float = 0.05) -> Tensor:
    guide = vae.encoder(x).chunk(2, -1)
    eps = torch.randn_like(guide[0]).requires_grad_()
    log_base, log_weight, gradient = evaluate(vae, x, guide, eps)
    total = -log_base
    for k in range(1, num_steps + 1):
        beta = k / num_steps
        noise = torch.randn_like(eps)
        drift = beta * gradient - eps
        eps = eps + eta * drift + math.sqrt(2 * eta) * noise
        log_base, log_weight, gradient = evaluate(vae, x, guide, eps)
        back = noise + math.sqrt(eta / 2) * (drift + beta * gradient - eps)
        total = total + 0.5 * (noise.square() - back.square()).sum(-1)
    return (total + log_base + log_weight).sum()


def ais(vae: VAE, x: Tensor, num_steps: int = 5, eta: float = 0.05) -> Tensor:
    guide = vae.encoder(x).chunk(2, -1)
    eps = torch.randn(2, *guide[0].shape).requires_grad_()
    state = (eps, *evaluate(vae, x, guide, eps))
    parts, scores = [state[2] / num_steps], []
    for k in range(1, num_steps):
        beta = k / num_steps
        noise = torch.randn_like(eps)
        drift = beta * state[3] - state[0]
        eps = state[0] + eta * drift + math.sqrt(2 * eta) * noise
        new = (eps, *evaluate(vae, x, guide, eps))
        back = noise + math.sqrt(eta / 2) * (drift + beta * new[3] - eps)
        change = new[1] - state[1] + beta * (new[2] - state[2])
        change = change + 0.5 * (noise.square() - back.square()).sum(-1)
        log_accept = change.clamp(max=0.0)
        accepted = torch.rand_like(log_accept) < log_accept.exp()
        rejected = torch.log(-torch.expm1(torch.where(accepted, -1.0, log_accept)))
        scores.append(torch.where(accepted, log_accept, rejected))
        a, b = accepted, accepted.unsqueeze(-1)
        where = (b, a, a, b)
        state = tuple(torch.where(c, n, o) for c, n, o in zip(where, new, state, strict=True))
        parts.append(state[2] / num_steps)
    total = torch.stack(parts).sum(0).mean(0)
    rest = torch.stack(parts).detach().flip(0).cumsum(0).flip(0)[1:]
    for r, score in zip(rest, scores, strict=True):
        total = total + ((r - r.flip(0)) * score).mean(0)
    return total.sum()


def compare(name: str, ours: Step, theirs: Step, steps: int) -> None:
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(steps + 3):
        for side in (0, 1) if i % 2 else (1, 0):
            start = time.process_time()
            (ours, theirs)[side]()
            times[side].append(time.process_time() - start)
    a, b = (statistics.median(t[3:]) for t in times)  # the first steps warm up
    print(f"{name:44} {1e3 * a:8.2f} ms {1e3 * b:8.2f} ms   ratio {a / b:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    x = torch.rand(100, 784).bernoulli()
    many: dict[str, Any] = {"vectorize_particles": True, "max_plate_nesting": 1}
    print(f"torch {torch.__version__}, pyro {pyro.__version__}, {args.threads} thread(s)")
    for validation in (True, False):
        pyro.enable_validation(validation)
        print(f"Pyro's validation {'on' if validation else 'off'}:")
        rows = {
            "IWAE-10 / RenyiELBO(0), 10 particles": (
                TraceIWAE_ELBO(10, **many),
                RenyiELBO(0, 10, **many),
                1,
            ),
            "IWAE-10 reparam / RenyiELBO(0)": (
                TraceIWAE_ELBO(10, "reparam", **many),
                RenyiELBO(0, 10, **many),
                1,
            ),
            "SGVB / TraceMeanField_ELBO": (TraceSGVB_ELBO(), TraceMeanField_ELBO(), 3),
            "SGVB estimator A / Trace_ELBO": (TraceSGVB_ELBO(1, False), Trace_ELBO(), 3),
        }
        for name, (ours, theirs, more) in rows.items():
            compare(name, with_pyro(ours, x), with_pyro(theirs, x), more * args.steps)
        iwae_step = with_pyro(TraceIWAE_ELBO(10, **many), x)
        compare("IWAE-10 / by hand in PyTorch", iwae_step, by_hand(iwae, x), args.steps)
        sgvb_step = with_pyro(TraceSGVB_ELBO(), x)
        compare("SGVB / by hand in PyTorch", sgvb_step, by_hand(sgvb, x), 3 * args.steps)
        one = {"max_plate_nesting": 1}
        for name, kernel in {"fixed": ULA(0.05), "adapting": ULA()}.items():
            sis_step = with_pyro(TraceSIS_ELBO(5, kernel, **one), x)
            compare(f"SIS-5 {name} / by hand in PyTorch", sis_step, by_hand(sis, x), args.steps)
        ais_step = with_pyro(TraceAIS_ELBO(5, MALA(0.05), **many), x)
        compare("AIS-5, 2 particles / by hand in PyTorch", ais_step, by_hand(ais, x), args.steps)
        fast = TraceSIS_ELBO(5, ULA(0.05), gradient_estimator="reweighted", **one)
        full = TraceSIS_ELBO(5, ULA(0.05), **one)
        compare("SIS-5 reweighted / full", with_pyro(fast, x), with_pyro(full, x), args.steps)


if __name__ == "__main__":
    main()
