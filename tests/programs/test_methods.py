"""A subclass that overrides a density or a sampler does not get its parent's closed forms."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions import kl
from torch.distributions.transforms import AffineTransform, ExpTransform

from pyro_mcvae import TraceRaoBlackwell_ELBO, TraceSGVB_ELBO, TraceSIS_ELBO
from pyro_mcvae.coordinates.noise import noise_of
from pyro_mcvae.programs.distributions import patched
from pyro_mcvae.programs.methods import has_methods_of
from pyro_mcvae.programs.supports import support_of
from pyro_mcvae.truncated.broadcast_log_prob import broadcast_log_prob

STANDARD = torch.distributions.Normal(torch.tensor(0.0), torch.tensor(1.0))


class Positive(dist.Normal):
    """A normal distribution, given that it is positive."""

    def expand(self, shape, _instance=None):
        return Positive(self.loc.expand(shape), self.scale.expand(shape))

    def rsample(self, sample_shape=()):
        low = STANDARD.cdf(-self.loc / self.scale)
        u = low + (1 - low) * torch.rand(self._extended_shape(torch.Size(sample_shape)))
        return self.loc + self.scale * STANDARD.icdf(u)

    def log_prob(self, value):
        return super().log_prob(value) - STANDARD.cdf(self.loc / self.scale).log()


class Floor(dist.Categorical):
    """A mixture of a categorical and the uniform distribution."""

    def expand(self, shape, _instance=None):
        logits = self.logits
        return type(self)(logits=logits.expand(torch.Size(shape) + logits.shape[-1:]))

    def mixture(self):
        return dist.Categorical(0.7 * self.probs + 0.3 / self.probs.shape[-1])

    def sample(self, sample_shape=()):
        return self.mixture().sample(torch.Size(sample_shape))

    def log_prob(self, value):
        return self.mixture().log_prob(value)


class FloorOneHot(dist.OneHotCategorical):
    def sample(self, sample_shape=()):
        probs = 0.7 * self.probs + 0.3 / self.probs.shape[-1]
        return dist.OneHotCategorical(probs).sample(torch.Size(sample_shape))

    def log_prob(self, value):
        probs = 0.7 * self.probs + 0.3 / self.probs.shape[-1]
        return dist.OneHotCategorical(probs).log_prob(value)


class FloorBernoulli(dist.Bernoulli):
    def sample(self, sample_shape=()):
        return dist.Bernoulli(0.7 * self.probs + 0.15).sample(torch.Size(sample_shape))

    def log_prob(self, value):
        return dist.Bernoulli(0.7 * self.probs + 0.15).log_prob(value)


class Entropy(dist.Normal):
    """Has an entropy of its own, which is wrong."""

    def entropy(self):
        return 3.0 + super().entropy()


class Renamed(dist.Laplace):
    """Overrides nothing."""


class Whole(dist.Independent):
    """A joint density of the event, which is not the sum of its entries."""

    def log_prob(self, value):
        return super().log_prob(value) - 1.0


def shifted(base):
    return dist.TransformedDistribution(base, [AffineTransform(1.0, 2.0)])


PAIRS = {
    "density": lambda: (Positive(torch.ones(3), 0.5), Positive(torch.zeros(3), 1.0)),
    "guide": lambda: (Positive(torch.ones(3), 0.5), dist.Normal(torch.zeros(3), 1.0)),
    "model": lambda: (dist.Normal(3 * torch.ones(3), 0.1), Positive(torch.zeros(3), 1.0)),
    "event": lambda: (
        Positive(torch.ones(3, 2), 0.5).to_event(1),
        dist.Normal(torch.zeros(3, 2), 1.0).to_event(1),
    ),
    "to a vector": lambda: (
        Positive(torch.ones(3, 2), 0.5).to_event(1),
        dist.MultivariateNormal(torch.zeros(3, 2), torch.eye(2)),
    ),
    "transformed": lambda: (
        shifted(Positive(torch.ones(3), 0.5)),
        shifted(dist.Normal(torch.zeros(3), 1.0)),
    ),
    "wrapper": lambda: (
        Whole(dist.Normal(torch.ones(3, 2), 0.5), 1),
        dist.Normal(torch.zeros(3, 2), 1.0).to_event(1),
    ),
    "categorical": lambda: (
        Floor(logits=torch.tensor([2.0, 0.0, -1.0]).expand(3, 3)),
        dist.Categorical(torch.ones(3, 3)),
    ),
    "one-hot": lambda: (
        FloorOneHot(logits=torch.tensor([2.0, 0.0, -1.0]).expand(3, 3)),
        dist.OneHotCategorical(torch.ones(3, 3)),
    ),
    "bernoulli": lambda: (
        FloorBernoulli(logits=torch.tensor([2.0, 0.0, -1.0])),
        dist.Bernoulli(torch.full((3,), 0.5)),
    ),
}


def programs(q, p, scale=1.0):
    def model():
        with pyro.plate("data", 3), pyro.poutine.scale(scale=scale):
            pyro.sample("z", p)

    def guide():
        with pyro.plate("data", 3):
            pyro.sample("z", q)

    return model, guide


def value(elbo, both):
    pyro.set_rng_seed(0)
    return elbo.loss(*both)


@pytest.mark.parametrize("name", PAIRS)
def test_a_divergence_is_drawn(name):
    both = programs(*PAIRS[name]())
    drawn = value(TraceSGVB_ELBO(analytic_kl=False), both)
    assert value(TraceSGVB_ELBO(), both) == drawn


def test_a_method_that_is_an_attribute_overrides_that_of_the_class():
    prior = dist.Normal(0.0, 1.0)
    prior.log_prob = lambda value: dist.Normal(0.0, 1.0).log_prob(value) - 1.0
    both = (lambda: pyro.sample("z", prior)), lambda: pyro.sample("z", dist.Normal(1.0, 0.5))
    assert value(TraceSGVB_ELBO(), both) == value(TraceSGVB_ELBO(analytic_kl=False), both)


def test_an_entropy_that_is_overridden_is_not_used():
    both = programs(Entropy(torch.ones(3), 0.5), dist.Normal(torch.zeros(3), 1.0), scale=0.5)
    assert value(TraceSGVB_ELBO(), both) == value(TraceSGVB_ELBO(analytic_kl=False), both)


def test_methods_that_a_subclass_inherits_keep_the_closed_form():
    normal = type("Renamed", (dist.Normal,), {"has_rsample": False, "note": "of a user"})
    both = programs(normal(torch.ones(3), 0.5), dist.Normal(torch.zeros(3), 1.0))
    exact = 3 * torch.distributions.kl_divergence(dist.Normal(1.0, 0.5), dist.Normal(0.0, 1.0))
    assert TraceSGVB_ELBO().loss(*both) == pytest.approx(exact.item())


def test_a_rule_that_is_registered_for_the_subclass_is_used():
    pair = (Positive, Positive)
    kl.register_kl(*pair)(lambda q, p: q.loc - p.loc)
    try:
        assert TraceSGVB_ELBO().loss(*programs(*PAIRS["density"]())) == 3.0
    finally:
        del kl._KL_REGISTRY[pair]
        kl._KL_MEMOIZE.clear()


MEANS = torch.tensor([-1.0, 0.0, 2.0])
X = torch.tensor([-1.0, 0.2, 1.5, 2.0])


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "event"])
@pytest.mark.parametrize("kind", [Floor, FloorOneHot])
@pytest.mark.parametrize("logits", [[2.0, 0.0, -1.0], [0.0, 3.0, -2.0]])
def test_sums_over_values_are_weighted_by_the_density(kind, wrapped, logits):
    logits, prior = torch.tensor(logits), torch.tensor([0.2, 0.5, 0.3])
    one_hot = kind is FloorOneHot
    family = dist.OneHotCategorical if one_hot else dist.Categorical

    def site(fn):
        fn = fn.expand([4, 1]).to_event(1) if wrapped else fn.expand([4])
        k = pyro.sample("k", fn)
        k = k.squeeze(-1 - one_hot) if wrapped else k
        return k @ MEANS.to(k) if one_hot else MEANS[k]

    def model():
        with pyro.plate("data", 4):
            pyro.sample("x", dist.Normal(site(family(prior)), 1.0), obs=X)

    def guide():
        with pyro.plate("data", 4):
            q = kind(logits=logits.expand(4, 1, 3) if wrapped else logits.expand(4, 3))
            pyro.sample("k", q.to_event(1) if wrapped else q)

    q = 0.7 * logits.softmax(0) + 0.1
    log_p = dist.Normal(MEANS, 1.0).log_prob(X[:, None]) + prior.log()
    exact = (q * (log_p - q.log())).sum().item()
    assert TraceRaoBlackwell_ELBO(math.inf).loss(model, guide) == pytest.approx(-exact)


@pytest.mark.parametrize(
    "fn",
    [
        Floor(logits=torch.tensor([2.0, 0.0])),
        FloorOneHot(logits=torch.tensor([2.0, 0.0])),
        FloorBernoulli(logits=torch.tensor(2.0)),
        FloorBernoulli(logits=torch.tensor([2.0, -1.0])).to_event(1),
        Whole(dist.Bernoulli(torch.tensor([0.2, 0.4])), 1),
    ],
    ids=lambda fn: type(fn).__name__,
)
def test_the_weight_of_a_value_is_its_probability(fn):
    support = support_of(fn)
    if support is None:  # it is drawn
        assert isinstance(fn, Whole)
        return
    values, weight, _ = support.all_values()
    assert torch.allclose(weight, fn.log_prob(values).exp())


def test_counts_of_another_law_have_no_slots():
    class Shifted(dist.Poisson):
        def log_prob(self, value):
            return super().log_prob(value - 1)

    assert support_of(dist.Poisson(2.0)) is not None
    assert support_of(Shifted(2.0)) is None


def test_noise_belongs_to_draws_and_density():
    assert noise_of(Positive(0.0, 1.0)) is None
    assert noise_of(Whole(dist.Normal(torch.zeros(2), 1.0), 1)) is None
    noise = noise_of(Renamed(torch.tensor(1.0), torch.tensor(2.0)))
    assert noise.transform(torch.tensor(3.0)) == 7.0
    z = torch.tensor(0.5)
    assert noise.standard.log_prob(z) == dist.Laplace(0.0, 1.0).log_prob(z)


def test_an_attribute_is_an_overridden_method():
    fn = dist.Normal(0.0, 1.0)
    assert has_methods_of(fn, dist.Normal)
    fn.rsample = lambda shape=(): torch.zeros(shape)
    assert not has_methods_of(fn, dist.Normal)
    assert noise_of(fn) is None


def test_a_sampler_of_the_user_is_not_patched():
    class Fixed(dist.CoalescentTimes):
        def sample(self, sample_shape=()):
            return torch.tensor([-1.0])

    leaves = torch.tensor([0.0, 0.0])
    assert patched(Fixed(leaves, torch.tensor(5.0))).sample() == -1.0
    assert patched(dist.CoalescentTimes(leaves, torch.tensor(5.0))).sample() != -1.0


def test_broadcast_densities_are_those_of_the_distribution():
    assert broadcast_log_prob(Whole(dist.Normal(torch.zeros(3), 1.0), 1), torch.ones(3)) is None


class Cut(dist.TransformedDistribution):
    """A log-normal distribution with a density of its own."""

    def log_prob(self, value):
        return super().log_prob(value) - 1.0


@pytest.mark.parametrize(
    "make",
    [
        lambda z: Whole(dist.Normal(torch.stack([z, 1 + z], -1), 1.0), 1),
        lambda z: Cut(dist.Normal(z, 1.0), [ExpTransform()]),
        lambda z: dist.HalfNormal(z.exp()),
        lambda z: dist.FoldedDistribution(dist.Normal(z, 1.0)),
    ],
    ids=["wrapper", "transformed", "half-normal", "folded"],
)
def test_particles_under_vmap_have_the_density_of_a_loop(make):
    """Indexing by a number of a latent needs vmap."""
    x = torch.tensor([[0.5, 1.5], [0.3, 0.2], [2.0, 1.0]])

    def model():
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            assert z.dim() <= 1
            fn = make(z.expand(3))
            pyro.sample("x", fn, obs=x if fn.event_shape else x[:, 0])

    def guide():
        with pyro.plate("data", 3):
            pyro.sample("z", dist.Normal(pyro.param("m", torch.zeros(3)), 1.0))

    losses = []
    for vectorize in (True, False):
        pyro.clear_param_store()
        elbo = TraceSIS_ELBO(1, num_particles=2, vectorize_particles=vectorize)
        losses.append(value(elbo, (model, guide)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
