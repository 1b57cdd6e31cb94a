"""A vectorised run must be the program that each particle is by itself."""

import functools
import math
import sysconfig
import types

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_mcvae import (
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
    TraceTruncated_ELBO,
    TruncatedPosterior,
)
from tests.cases import every
from tests.params import in_turn

# What this comparison refuses is run under vmap otherwise: see particles/test_modes.py.
pytestmark = pytest.mark.usefixtures("leading_dims_only")
OBJECTIVES = {
    "sgvb": lambda **k: TraceSGVB_ELBO(num_particles=5, **k),
    "iwae": lambda **k: TraceIWAE_ELBO(5, **k),
    "sis": lambda **k: TraceSIS_ELBO(1, num_particles=5, **k),
    "ais": lambda **k: TraceAIS_ELBO(1, num_particles=5, **k),
    "rb": lambda **k: TraceRaoBlackwell_ELBO(num_particles=5, **k),
}
FEATURES = 4


class Pair:
    """A decoder between two latents and four features, for six data (or as many as features)."""

    def __init__(self, layer, data=6, dtype=torch.float64):
        torch.manual_seed(0)
        self.first, self.layer = nn.Linear(2, FEATURES, dtype=dtype), layer
        self.x = torch.randn(data, FEATURES, dtype=dtype)

    def model(self):
        with pyro.plate("data", len(self.x)):
            z = pyro.sample("z", dist.Normal(self.x.new_zeros(2), 1.0).to_event(1))
            loc = self.layer(self.first(z))
            pyro.sample("x", dist.Normal(loc, 1.0).to_event(1), obs=self.x)

    def guide(self):
        with pyro.plate("data", len(self.x)):
            pyro.sample("z", dist.Normal(self.x.new_full((2,), 0.2), 0.9).to_event(1))


class Flat(nn.BatchNorm1d):
    def forward(self, h):
        return super().forward(h.reshape(-1, h.shape[-1])).reshape(h.shape)


FROM_THE_LEFT = {
    "softmax": lambda h: h.softmax(1),
    "softmax over the data": lambda h: h.softmax(0),
    "mean": lambda h: h - h.mean(),
    "norm": lambda h: h / h.norm(),
    "neighbours": lambda h: h.roll(1, 0),
    "cumulated": lambda h: h.cumsum(0),
}
FROM_THE_RIGHT = {
    "softmax": lambda h: h.softmax(-1),
    "centred": lambda h: h - h.mean(-2, keepdim=True),
    "dropout": nn.Dropout(0.5),
    "noise": lambda h: h + torch.randn(h.shape).to(h),
    "batch norm": Flat(FEATURES, dtype=torch.float64),
}


@in_turn(layer=FROM_THE_LEFT, objective=OBJECTIVES)
def test_dims_that_are_counted_from_the_left_are_refused(layer, objective):
    pair = Pair(FROM_THE_LEFT[layer])
    with pytest.raises(RuntimeError, match=r"site 'x' of the model.*count dims from the right"):
        OBJECTIVES[objective](vectorize_particles=True).loss(pair.model, pair.guide)


@in_turn(objective=OBJECTIVES, dtype=[torch.float32, torch.float64])
def test_batch_norm_of_as_many_data_as_features_is_refused(dtype, objective):
    # Of [particles, data, features] it takes the data for the features: a layer of other
    # statistics, whose loss was 24.4 where particles one by one have 29.0.
    pair = Pair(nn.BatchNorm1d(FEATURES, dtype=dtype), FEATURES, dtype)
    before = pair.layer.running_mean.clone()
    elbo = OBJECTIVES[objective]
    with pytest.raises(RuntimeError, match=r"another log density.*nn\.BatchNorm1d"):
        elbo(vectorize_particles=True).loss(pair.model, pair.guide)
    pair.layer.eval()
    assert math.isfinite(elbo(vectorize_particles=False).loss(pair.model, pair.guide))
    assert before.shape == pair.layer.running_mean.shape


@in_turn(layer=FROM_THE_RIGHT, data=[6, FEATURES], dtype=[torch.float32, torch.float64])
def test_dims_that_are_counted_from_the_right_are_accepted(layer, data, dtype):
    result = FROM_THE_RIGHT[layer]
    result = result.to(dtype) if isinstance(result, nn.Module) else result
    pair = Pair(result, data, dtype)
    for make in OBJECTIVES.values():
        assert math.isfinite(make(vectorize_particles=True).loss(pair.model, pair.guide))


def test_the_guide_is_looked_at_too():
    x = torch.randn(3, 2)

    def model():
        with pyro.plate("data", 3):
            a = pyro.sample("a", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            b = pyro.sample("b", dist.Normal(a, 1.0).to_event(1))
            pyro.sample("x", dist.Normal(b, 1.0).to_event(1), obs=x)

    def guide():
        with pyro.plate("data", 3):
            a = pyro.sample("a", dist.Normal(x, 1.0).to_event(1))
            pyro.sample("b", dist.Normal(a.softmax(1), 1.0).to_event(1))

    with pytest.raises(RuntimeError, match="site 'b' of the guide"):
        TraceIWAE_ELBO(4, vectorize_particles=True).loss(model, guide)


def digits(dim):
    """A decoder of a discrete latent, whose slots or states stand in a leading dim."""
    table = torch.tensor([[0.3, -1.0, 2.0], [1.0, 0.4, 0.2]])
    x = torch.tensor([[0.1, 0.5, 0.2], [0.6, 0.2, 0.4], [0.3, 0.3, 0.3], [0.0, 1.0, 0.1]])

    def model():
        with pyro.plate("data", 4):
            y = pyro.sample("y", dist.Bernoulli(0.4))
            loc = torch.where(y.unsqueeze(-1) > 0, table[0], table[1]).softmax(dim)
            pyro.sample("x", dist.Normal(loc, 0.5).to_event(1), obs=x)

    def guide():
        with pyro.plate("data", 4):
            pyro.sample("y", dist.Bernoulli(0.3))

    return model, guide


def test_slots_are_a_leading_dim():
    """Where the model takes their dim for another they stand in rows, unless that is forbidden."""
    result = [TraceRaoBlackwell_ELBO(2).loss(*digits(dim)) for dim in (1, -1)]
    assert result[0] == pytest.approx(result[1])
    with pytest.raises(RuntimeError, match=r"slots.*num_categories=0"):
        TraceRaoBlackwell_ELBO(2, vectorize_particles=True).loss(*digits(1))


def test_states_are_a_leading_dim():
    elbo = TraceTruncated_ELBO(vectorize_particles=True)
    model, _ = digits(1)
    with pytest.raises(RuntimeError, match="states side by side"):
        elbo.loss(model, TruncatedPosterior(model, num_states=2))
    model, _ = digits(-1)
    assert math.isfinite(elbo.loss(model, TruncatedPosterior(model, num_states=2)))


def test_other_sizes_are_looked_at_again():
    # The same sites with as many data as features, as a last smaller batch may be.
    pair = Pair(lambda h: h if len(h) != FEATURES else h / 2, data=6)
    elbo = TraceIWAE_ELBO(5, vectorize_particles=True)
    elbo.loss(pair.model, pair.guide)
    pair.x = pair.x[:FEATURES]
    with pytest.raises(RuntimeError, match="another log density"):
        elbo.loss(pair.model, pair.guide)


class Solver(nn.Module):
    """Approaches tanh(h) until the last element of the batch is near enough."""

    def forward(self, h):
        y = torch.zeros_like(h)
        while (h.tanh() - y).detach().abs().max() > 2e-4:
            y = y + 0.4 * (h.tanh() - y)
        return y


@pytest.mark.parametrize("name", OBJECTIVES)
def test_decisions_by_a_latent_are_not_taken_for_all_particles_at_once(name):
    pair = Pair(Solver())
    with pytest.raises(RuntimeError, match=r"'z', at .*test_vectorization.py:\d+, while") as result:
        OBJECTIVES[name](vectorize_particles=True).loss(pair.model, pair.guide)
    assert "torch.where" in str(result.value)


def test_a_model_of_an_installed_package_decides_as_well():
    def installed(function):
        place = sysconfig.get_path("purelib") + "/theirs/model.py"
        return types.FunctionType(function.__code__.replace(co_filename=place), globals())

    theirs = type("Theirs", (Solver,), {"forward": installed(Solver.forward)})
    pair = Pair(theirs())
    model = types.MethodType(installed(Pair.model), pair)
    elbo = TraceIWAE_ELBO(5, vectorize_particles=True)
    for program, place in ((pair.model, "test_vectorization.py"), (model, "theirs/model.py")):
        with pytest.raises(RuntimeError, match=rf"'z', at \S*{place}:\d+"):
            elbo.loss(program, pair.guide)


class Guarded(nn.Module):
    """Looks at what is no latent, and whether all is finite and as expected."""

    def forward(self, h):
        assert (h.tanh().abs() <= 1).all(), "stops the program, or changes nothing"
        if torch.ones(3).sum() > 2 and not h.isnan().any():
            return h
        raise ValueError("not finite")


@pytest.mark.parametrize("name", every(2, OBJECTIVES))
def test_other_decisions_are(name):
    pair = Pair(Guarded())
    OBJECTIVES[name](vectorize_particles=True).loss(pair.model, pair.guide)


@pytest.mark.parametrize("size", [None, 3], ids=["all data", "minibatch"])
@pytest.mark.parametrize("with_global", [False, True], ids=["local", "global"])
def test_the_comparison_is_made_on_one_minibatch(with_global, size, caplog):
    """Which each run would draw again: other data have other densities, as noise has."""
    x = torch.randn(12, 2)

    def program(observe, dim):
        if with_global:
            pyro.sample("s", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 12, subsample_size=size) as i:
            loc = torch.zeros(2) if observe else x[i]
            z = pyro.sample("z", dist.Normal(loc, 1.0).to_event(1))
            if observe:
                pyro.sample("x", dist.Normal(z.softmax(dim), 0.7).to_event(1), obs=x[i])

    guide, wrong = functools.partial(program, False, -1), functools.partial(program, True, 1)
    for seed in range(2):
        pyro.set_rng_seed(seed)
        with pytest.raises(RuntimeError, match="'x' of the model has another log density"):
            TraceIWAE_ELBO(4, vectorize_particles=True).loss(wrong, guide)
        TraceIWAE_ELBO(4).loss(functools.partial(program, True, -1), guide)
        assert "run one by one" not in caplog.text
