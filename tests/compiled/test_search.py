"""Steps of truncated posteriors, recorded with their search: the same states, bit for bit."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_mcvae import (
    CompiledELBO,
    EvolutionaryUpdate,
    InformedFlips,
    TraceTruncated_ELBO,
    TruncatedPosterior,
    UniformFlips,
)
from tests.cases import some_slow
from tests.compiled.programs import reasons, uses

N, H = 12, 6


def bits(x: Tensor, index: Tensor) -> None:
    logits = pyro.param("logits", torch.full((H,), -1.0))
    weight = pyro.param("weight", torch.linspace(-1, 1, H * 3).reshape(H, 3))
    with pyro.plate("data", N, subsample=index):
        z = pyro.sample("z", dist.Bernoulli(logits=logits).to_event(1))
        pyro.sample("x", dist.Normal(z @ weight, 0.5).to_event(1), obs=x[index])


def classes(x: Tensor, index: Tensor) -> None:
    loc = pyro.param("loc", torch.linspace(-2, 2, 5))
    with pyro.plate("data", N, subsample=index):
        k = pyro.sample("k", dist.Categorical(torch.ones(5) / 5))
        z = pyro.sample("z", dist.Bernoulli(0.3 * torch.ones(3)).to_event(1))
        pyro.sample("x", dist.Normal(loc[k] + z.sum(-1), 0.5), obs=x[index, 0])


def with_weights(x: Tensor, index: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(H, 3), 1.0).to_event(2))
    with pyro.plate("data", N, subsample=index):
        z = pyro.sample("z", dist.Bernoulli(0.3 * torch.ones(H)).to_event(1))
        pyro.sample("x", dist.Normal(z @ w, 0.5).to_event(1), obs=x[index])


def about_weights(x: Tensor, index: Tensor) -> None:
    loc = pyro.param("w_loc", torch.zeros(H, 3))
    pyro.sample("w", dist.Normal(loc, 0.1).to_event(2))


SEARCHES: dict[str, tuple[Callable[..., None], dict[str, Any], dict[str, Any]]] = {
    "uniform, gradient through the best": (
        bits,
        {"evolution": EvolutionaryUpdate(2, 2, 2, mutation=UniformFlips())},
        {"num_gradient_states": 2},
    ),
    "informed": (bits, {"evolution": EvolutionaryUpdate(2, 2, 1, mutation=InformedFlips())}, {}),
    "classes": (classes, {}, {}),
    "global latents, the prior's draws": (
        with_weights,
        {"guide": about_weights, "prior_draws": 3},
        {},
    ),
    "looped": (bits, {"vectorize": False}, {"vectorize_particles": False}),
}


def trained(
    model: Callable[..., None],
    options: dict[str, Any],
    loss: Any,
    rate: float = 0.05,
    steps: int = 10,
) -> tuple[list[float], list[Tensor]]:
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    x = torch.randn(N, 3)
    guide = TruncatedPosterior(model, 5, **options)
    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": rate}), loss)
    order = torch.Generator().manual_seed(1)
    losses = []
    for step in range(steps):
        guide.train(step != 8)
        losses.append(svi.step(x, torch.randperm(N, generator=order)[:4]))
    states = list(guide.buffers()) + list(pyro.get_param_store()._params.values())
    return losses, [s.detach().clone() for s in states]


# The others are quicker, and of the same kind.
_KINDS = some_slow(SEARCHES, "looped", "classes", "global latents, the prior's draws")


@pytest.mark.parametrize("kind", _KINDS)
def test_a_recorded_search_finds_the_states_of_the_plain_one(kind: str) -> None:
    model, options, settings = SEARCHES[kind]
    expected = trained(model, options, TraceTruncated_ELBO(**settings))
    loss = CompiledELBO(TraceTruncated_ELBO(**settings), backend="eager")
    result = trained(model, options, loss)
    assert result[0] == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(result[1], expected[1], strict=True))
    assert not reasons(loss)
    assert uses(loss) >= 5


@pytest.mark.slow
def test_a_prior_whose_bits_become_likely() -> None:
    """A density that is computed in different ways for likely and unlikely bits would differ."""

    def model(x: Tensor, index: Tensor) -> None:
        logits = pyro.param("logits", torch.full((H,), -0.3))
        with pyro.plate("data", N, subsample=index):
            z = pyro.sample("z", dist.Bernoulli(logits=logits).to_event(1))
            pyro.sample("x", dist.Normal(z.sum(-1), 0.5), obs=x[index, 0].abs() + 4)

    options = {"evolution": EvolutionaryUpdate(2, 2, 1, mutation=UniformFlips())}
    expected = trained(model, options, TraceTruncated_ELBO(), 0.06, 16)
    loss = CompiledELBO(TraceTruncated_ELBO(), backend="eager")
    result = trained(model, options, loss, 0.06, 16)
    assert result[0] == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(result[1], expected[1], strict=True))
    (case,) = loss._specializations.values()
    assert (case._failures, reasons(loss)) == (0, [])
    assert (pyro.param("logits") > 0).any()


@pytest.mark.slow
def test_steps_that_go_back_and_forth_have_two_recordings() -> None:
    mode = SimpleNamespace(likely=False)

    def model(x: Tensor) -> None:
        logits = pyro.param("logits", torch.full((H,), -0.3))
        with pyro.plate("data", N):
            prior = dist.Bernoulli(logits=logits + 1 if mode.likely else logits - 1)
            z = pyro.sample("z", prior.to_event(1))
            pyro.sample("x", dist.Normal(z.sum(-1), 0.5), obs=x)

    x, runs = torch.randn(N), []
    for loss in (TraceTruncated_ELBO(), compiled := CompiledELBO(TraceTruncated_ELBO(), "eager")):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        guide = TruncatedPosterior(model, 5, evolution=EvolutionaryUpdate(2, 2, 1))
        svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), loss)
        losses = []
        for step in range(40):
            mode.likely = bool(step // 8 % 2)
            losses.append(svi.step(x))
        runs.append(losses)
    assert runs[0] == runs[1]
    (case,) = compiled._specializations.values()
    assert (len(case._recordings), reasons(compiled)) == (2, [])
