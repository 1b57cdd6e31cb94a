"""Networks in half precision, weights in single: only the networks' own rounding is left."""

from contextlib import nullcontext

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_mcvae import (
    MALA,
    ULA,
    EvolutionaryUpdate,
    InformedFlips,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
    TraceTruncated_ELBO,
    TruncatedPosterior,
    UniformFlips,
)
from pyro_mcvae.programs.sites import full_precision
from tests.cases import some_slow

FAST = {"vectorize_particles": True, "max_plate_nesting": 1}
CONTINUOUS = {
    "sgvb": lambda: TraceSGVB_ELBO(),
    "iwae": lambda: TraceIWAE_ELBO(3, **FAST),
    "iwae-looped": lambda: TraceIWAE_ELBO(2),
    "sis": lambda: TraceSIS_ELBO(2, ULA(0.01)),
    "sis-reweighted": lambda: TraceSIS_ELBO(2, ULA(0.01), gradient_estimator="reweighted"),
    "ais": lambda: TraceAIS_ELBO(2, MALA(0.01), **FAST),
}
SLOW = "iwae-looped", "sis"
N, D, PIXELS = 4, 3, 300


@pytest.fixture(autouse=True)
def single_precision(double_precision):
    torch.set_default_dtype(torch.float32)


class Autocast(nn.Module):
    """A network that computes in bfloat16 and returns it."""

    def __init__(self, *layers, by_hand=False):
        super().__init__()
        self.layers, self.by_hand = nn.Sequential(*layers), by_hand

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.layers(x)

    def cast(self, parameter):
        """What one would write without this package's help."""
        return parameter.float() if self.by_hand else parameter


class VAE(nn.Module):
    """Counts of several kinds, whose densities know nothing but the decoder's output."""

    def __init__(self, by_hand, multivariate=False):
        super().__init__()
        torch.manual_seed(1)
        self.encoder = Autocast(nn.Linear(PIXELS, 2 * D), by_hand=by_hand)
        self.decoder = Autocast(
            nn.Linear(D, 20), nn.Tanh(), nn.Linear(20, 3 * PIXELS), by_hand=by_hand
        )
        self.chol, self.multivariate = torch.randn(D, D).tril(-1) + torch.eye(D), multivariate
        self.x = torch.randint(4, (N, PIXELS))

    def model(self):
        with pyro.plate("data", N):
            z = pyro.sample("z", dist.Normal(torch.zeros(D), 1.0).to_event(1))
            logits, log_rate, loc = self.decoder(z).unflatten(-1, (PIXELS, 3)).unbind(-1)
            cast, rate = self.decoder.cast, log_rate.exp()
            x = self.x.float()
            pyro.sample("b", dist.Bernoulli(logits=cast(logits)).to_event(1), obs=(x > 1).float())
            pyro.sample("n", dist.Poisson(cast(rate)).to_event(1), obs=x)
            pyro.sample("x", dist.Normal(cast(loc), 1.0).to_event(1), obs=x)

    def guide(self):
        loc, log_scale = self.encoder(self.x.float() / 4).chunk(2, -1)
        cast = self.encoder.cast
        loc, scale = cast(loc), cast(log_scale.exp())
        with pyro.plate("data", N):
            if self.multivariate:
                return pyro.sample("z", dist.MultivariateNormal(loc, scale_tril=self.chol))
            return pyro.sample("z", dist.Normal(loc, scale).to_event(1))


def bounds_and_gradients(vae, make, around=False):
    context = torch.autocast("cpu", torch.bfloat16) if around else nullcontext()
    pyro.set_rng_seed(2)
    with context:
        per_datum = make().bounds(vae.model, vae.guide).per_datum
    pyro.set_rng_seed(2)
    with context:
        loss = make().differentiable_loss(vae.model, vae.guide)
    loss.backward()
    assert per_datum.dtype == loss.dtype == torch.float32
    return per_datum, loss, [p.grad for p in vae.parameters()]


def assert_same(first, second):
    for one, other in zip(first[:2], second[:2], strict=True):
        assert torch.allclose(one, other, rtol=1e-6)
    for one, other in zip(first[2], second[2], strict=True):
        # The networks' backward passes round where they add up; 2^-9 is the rounding unit.
        assert torch.allclose(one, other, rtol=2**-6, atol=2**-6 * float(one.abs().max()))


@pytest.mark.parametrize("name", some_slow(CONTINUOUS, *SLOW))
def test_the_bound_is_that_of_outputs_cast_by_hand(name):
    make = CONTINUOUS[name]
    result = bounds_and_gradients(VAE(by_hand=False), make)
    assert_same(result, bounds_and_gradients(VAE(by_hand=True), make))
    assert result[0].min() < -300  # where bfloat16 has steps of two nats
    if name != "ais":  # of which a move that rounding has rejected goes another way
        assert_the_networks_rounding(result[0], make)


# Elsewhere PyTorch's own draws multiply matrices under autocast.
@pytest.mark.parametrize(
    ("name", "multivariate"),
    [
        pytest.param(name, multivariate, marks=pytest.mark.slow if name in SLOW else ())
        for name in CONTINUOUS
        for multivariate in [name in ("sis-reweighted", "ais")]
    ],
)
def test_autocast_around_the_loss_is_autocast_in_the_networks(name, multivariate):
    make = CONTINUOUS[name]
    result = bounds_and_gradients(VAE(False, multivariate), make, around=True)
    assert_same(result, bounds_and_gradients(VAE(True, multivariate), make))


def assert_the_networks_rounding(result, make):
    """Against float64, with the networks' weights and the noise of the same values."""
    exact = VAE(by_hand=False)
    for network in (exact.encoder, exact.decoder):
        network.forward = network.layers.forward
    single = bounds_and_gradients(exact, make)[0]
    error = (result - single).abs() / single.abs()
    # The rounding unit is 2^-9; errors of the outputs average out over the pixels.
    assert error.max() < 2**-9
    assert error.max() > 0


def discrete(by_hand):
    torch.manual_seed(3)
    decoder = Autocast(nn.Linear(4, PIXELS), by_hand=by_hand)
    encoder = Autocast(nn.Linear(PIXELS, 4), by_hand=by_hand)
    x = torch.randint(2, (N, PIXELS)).float()

    def model():
        with pyro.plate("data", N):
            y = pyro.sample("y", dist.OneHotCategorical(logits=torch.zeros(4)))
            pyro.sample("x", dist.Bernoulli(logits=decoder.cast(decoder(y))).to_event(1), obs=x)

    def guide():
        with pyro.plate("data", N):
            pyro.sample("y", dist.OneHotCategorical(logits=encoder.cast(encoder(x))))

    return model, guide


@pytest.mark.parametrize("name", ["rb", "rb-exact", "iwae", "truncated"])
def test_discrete_objectives_too(name):
    result = []
    for by_hand in (False, True):
        model, guide = discrete(by_hand)
        if name == "truncated":
            guide = TruncatedPosterior(model, num_states=3)
        make = {
            "rb": lambda: TraceRaoBlackwell_ELBO(1, 2),
            "rb-exact": lambda: TraceRaoBlackwell_ELBO(4),
            "iwae": lambda: TraceIWAE_ELBO(3),
            "truncated": lambda: TraceTruncated_ELBO(),
        }[name]
        pyro.set_rng_seed(5)
        result.append(make().bounds(model, guide).per_datum)
    assert result[0].dtype == torch.float32
    # The guide's own logits have been rounded once more, by the distribution.
    assert torch.allclose(*result, rtol=1e-6 if name == "truncated" else 1e-3)


@pytest.mark.parametrize("mutation", [InformedFlips(), UniformFlips()], ids=["informed", "uniform"])
def test_a_search_under_autocast_leaves_gradients(mutation):
    """PyTorch 2.5 would go on with the weights that the search, without gradients, has cast."""
    decoder, x = nn.Linear(5, PIXELS), torch.randn(N, PIXELS)

    def model():
        with pyro.plate("data", N):
            z = pyro.sample("z", dist.Bernoulli(0.3 * torch.ones(5)).to_event(1))
            pyro.sample("x", dist.Normal(decoder(z), 1.0).to_event(1), obs=x)

    def gradient(**autocast):
        guide = TruncatedPosterior(model, 8, evolution=EvolutionaryUpdate(mutation=mutation))
        pyro.set_rng_seed(5)
        with torch.autocast("cpu", torch.bfloat16, **autocast):
            loss = TraceTruncated_ELBO().differentiable_loss(model, guide)
        return torch.autograd.grad(loss, decoder.weight)[0]

    expected = gradient(cache_enabled=False)
    assert torch.allclose(gradient(), expected, atol=2**-6 * float(expected.abs().max()))


def test_categories_stay_normalised():
    logits = torch.randn(50, 7).mul(9).bfloat16()
    for fn in (
        dist.Categorical(logits=logits),
        dist.Categorical(probs=logits.softmax(-1)),
        dist.OneHotCategorical(logits=logits),
    ):
        assert not torch.allclose(fn.probs.float().sum(-1), torch.ones(50), rtol=1e-6)
        wide = full_precision(fn)
        assert torch.allclose(wide.probs.sum(-1), torch.ones(50), rtol=1e-6)
        support = wide.enumerate_support()
        assert torch.allclose(wide.log_prob(support).exp().sum(0), torch.ones(50), rtol=1e-6)


half = torch.ones(3, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "fn",
    [
        dist.Normal(half, half),
        dist.Normal(half, half).to_event(1),
        dist.Normal(half, half).expand([2, 3]).mask(torch.tensor(True)),
        dist.TransformedDistribution(dist.Normal(half, half), [dist.transforms.ExpTransform()]),
        dist.LogNormal(half, half),
        dist.MixtureSameFamily(dist.Categorical(logits=half), dist.Normal(half, half)),
        dist.Delta(half),
        dist.Bernoulli(logits=half.to(torch.float16)),
    ],
    ids=lambda fn: type(fn).__name__,
)
def test_distributions_are_cast_wherever_their_parameters_are(fn):
    with pyro.validation_enabled(False):
        wide = full_precision(fn)
        value = torch.ones(3) if not isinstance(fn, dist.MixtureSameFamily) else torch.ones(())
        assert wide.log_prob(value).dtype == torch.float32
    assert type(wide) is type(fn)
    assert wide is not fn
    assert fn.sample().dtype != torch.float32  # the program's own is as it was
    assert full_precision(wide) is wide


def test_gradients_pass_through_the_cast():
    loc = torch.zeros(3, dtype=torch.bfloat16, requires_grad=True)
    full_precision(dist.Normal(loc, 1.0)).log_prob(torch.ones(3)).sum().backward()
    assert torch.equal(loc.grad.float(), torch.ones(3))


def half(by_hand):
    """
    A program in bfloat16 throughout, with a structured guide; by hand, one whose densities are in
    single precision and whose networks get the draws in bfloat16.
    """
    torch.manual_seed(4)
    encoder, second = nn.Linear(PIXELS, D).bfloat16(), nn.Linear(D, D).bfloat16()
    decoder, x = nn.Linear(2 * D, PIXELS).bfloat16(), torch.randn(N, PIXELS).bfloat16()

    def cast(parameter):
        return parameter.float() if by_hand else parameter

    def narrow(draw):
        return draw.bfloat16() if by_hand else draw

    def model():
        zero = cast(torch.zeros(D).bfloat16())
        with pyro.plate("data", N):
            a = narrow(pyro.sample("a", dist.Normal(zero, 1.0).to_event(1)))
            b = narrow(pyro.sample("b", dist.Normal(zero, 1.0).to_event(1)))
            assert a.dtype == b.dtype == torch.bfloat16
            loc = cast(decoder(torch.cat([a, b], -1)))
            pyro.sample("x", dist.Normal(loc, 0.5).to_event(1), obs=cast(x))

    def guide():
        with pyro.plate("data", N):
            loc = cast(encoder(x))
            a = narrow(pyro.sample("a", dist.Normal(loc, 0.5).to_event(1)))
            pyro.sample("b", dist.Normal(cast(second(a)), 0.5).to_event(1))

    return model, guide, [*encoder.parameters(), *second.parameters(), *decoder.parameters()]


@pytest.mark.parametrize("name", some_slow(CONTINUOUS, "iwae-looped", "sis", "ais"))
def test_networks_in_half_precision_throughout_get_draws_of_theirs(name):
    result = []
    for by_hand in (False, True):
        model, guide, parameters = half(by_hand)
        pyro.set_rng_seed(2)
        loss = CONTINUOUS[name]().differentiable_loss(model, guide)
        loss.backward()
        assert loss.dtype == torch.float32
        result.append((loss, [p.grad for p in parameters]))
    torch.testing.assert_close(result[0][0], result[1][0], rtol=1e-6, atol=0)
    for one, other in zip(result[0][1], result[1][1], strict=True):
        # A chain's passes through the networks add up in bfloat16; the terms of the decisions to
        # accept are of hundreds, of either sign.
        least = 512 if name == "ais" else 0
        error, size = (one - other).float().norm(), other.float().norm()
        assert error < 2**-5 * max(float(size), least), (one, other)
