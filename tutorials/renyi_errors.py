"""Compare Pyro's ``RenyiELBO(alpha=0)``, which has three silent errors, with ``TraceIWAE_ELBO``.

The exact values are known.

Run it::

    python tutorials/renyi_errors.py
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import RenyiELBO

from pyro_mcvae import TraceIWAE_ELBO

N = 100
K = 20
x = math.sqrt(2) * torch.randn(N, generator=torch.Generator().manual_seed(0))


# --- 1. The scale of a minibatch belongs outside the logarithm ------------------------------------


def model(batch_size: int) -> None:
    with pyro.plate("data", N, subsample_size=batch_size) as rows:
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z, 1.0), obs=x[rows])


def guide(batch_size: int) -> None:
    with pyro.plate("data", N, subsample_size=batch_size) as rows:
        pyro.sample("z", dist.Normal(0.3 * x[rows], 1.0))


def mean_loss(elbo: Any, batch_size: int, count: int = 2000) -> str:
    losses = torch.tensor([elbo.loss(model, guide, batch_size) for _ in range(count)])
    return f"{losses.mean():.1f} ± {losses.std() / count**0.5:.1f}"


# --- 2. A discrete guide needs a score-function gradient ------------------------------------------

WEIGHTS, LOCS = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([-2.0, 0.0, 2.0])


def discrete_model() -> None:
    z = pyro.sample("z", dist.Categorical(WEIGHTS))
    pyro.sample("x", dist.Normal(LOCS[z], 1.0), obs=torch.tensor(1.0))


def discrete_guide() -> None:
    pyro.sample("z", dist.Categorical(logits=pyro.param("logits", torch.zeros(3))))


def exact_gradient(num_particles: int = 2) -> torch.Tensor:
    """Return the gradient of E log mean_k w_k for the guide's logits, summed over all draws."""
    logits = torch.zeros(3, requires_grad=True)
    log_q = logits.log_softmax(-1)
    log_w = WEIGHTS.log() + dist.Normal(LOCS, 1.0).log_prob(torch.tensor(1.0)) - log_q
    draws = torch.tensor(list(itertools.product(range(3), repeat=num_particles)))
    bound = log_w[draws].logsumexp(-1) - math.log(num_particles)
    (log_q[draws].sum(-1).exp() * bound).sum().backward()
    return logits.grad


def mean_gradient(elbo: Any, count: int = 4000) -> torch.Tensor:
    pyro.clear_param_store()
    total = torch.zeros(3)
    for _ in range(count):
        elbo.loss_and_grads(discrete_model, discrete_guide)
        logits = pyro.param("logits").unconstrained()
        total, logits.grad = total - logits.grad, None
    return total / count


# --- 3. One step has one minibatch ----------------------------------------------------------------


def minibatches_per_step(elbo: Any) -> int:
    seen = set()

    def noting(program: Callable[..., None]) -> Callable[[int], None]:
        def run(batch_size: int) -> None:
            with pyro.poutine.trace() as tracer:
                program(batch_size)
            seen.add(tuple(tracer.trace.nodes["data"]["value"].tolist()))

        return run

    elbo.loss(noting(model), noting(guide), 10)
    return len(seen)


def show(vector: torch.Tensor) -> str:
    return "(" + ", ".join(f"{v:.3f}" for v in vector) + ")"


def main() -> None:
    pyro.set_rng_seed(0)
    evidence = dist.Normal(0.0, math.sqrt(2)).log_prob(x).sum()
    print(f"exact -log p(x) = {-evidence:.1f}, the lowest valid loss. K = {K}, 100 data")
    for batch_size in (100, 50, 10, 2):
        theirs = mean_loss(RenyiELBO(0, K, vectorize_particles=True), batch_size)
        ours = mean_loss(TraceIWAE_ELBO(K), batch_size)
        print(f"  loss at minibatches of {batch_size:3}:  RenyiELBO {theirs:>14}   ours {ours:>14}")

    print(f"gradient of a discrete guide's logits, K = 2: exact {show(exact_gradient())}")
    theirs, ours = mean_gradient(RenyiELBO(0, 2)), mean_gradient(TraceIWAE_ELBO(2))
    print(f"  mean of 4000 steps:  RenyiELBO {show(theirs)}   ours {show(ours)}")

    looped = RenyiELBO(0, K), TraceIWAE_ELBO(K, vectorize_particles=False)
    counts = [minibatches_per_step(elbo) for elbo in looped]
    print(
        f"minibatches in one step of {K} looped particles:  RenyiELBO {counts[0]}, ours {counts[1]}"
    )


if __name__ == "__main__":
    main()
