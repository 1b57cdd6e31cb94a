"""Programs that Pyro's examples and tutorials show, cut down: masks and scales that are drawn."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.contrib.forecast import Forecaster, ForecastingModel, forecaster
from pyro.infer import TraceEnum_ELBO
from torch.distributions import constraints

from pyro_mcvae import (
    MALA,
    ULA,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
)
from tests.estimates import assert_mean

CHAINS = {
    "sis": lambda **k: TraceSIS_ELBO(8, ULA(0.02), multi_sample=True, **k),
    "ais": lambda **k: TraceAIS_ELBO(8, MALA(0.2), multi_sample=True, **k),
}
X = (1.0, 2.0, 0.0)


def drawn(around):
    """A pair in which a latent decides how another one counts, as presence does in AIR."""

    def model():
        with pyro.plate("data", 3):
            a = pyro.sample("a", dist.Normal(0.0, 1.0))
            with around(a):
                b = pyro.sample("b", dist.Normal(1.0, 1.0))
            pyro.sample("x", dist.Normal(a + b, 1.0), obs=torch.tensor(X))

    def guide():
        with pyro.plate("data", 3):
            a = pyro.sample("a", dist.Normal(0.3, 1.0))
            with around(a):
                pyro.sample("b", dist.Normal(0.4, 0.8))

    return model, guide


def scaled(a):
    # At most 1: chains refuse more, whose targets grow without end.
    return poutine.scale(scale=0.8 * torch.sigmoid(a) + 0.2)


def masked(a):
    return poutine.mask(mask=a > 0)


def scaled_evidence(num=1500):
    """log E_q[w] per datum by quadrature over both latents."""
    a = torch.linspace(-7, 7, num)[:, None]
    b = torch.linspace(-6, 8, num)
    normal = dist.Normal
    q_a, q_b = normal(0.3, 1.0).log_prob(a), normal(0.4, 0.8).log_prob(b)
    ratio = (0.8 * torch.sigmoid(a) + 0.2) * (normal(1.0, 1.0).log_prob(b) - q_b)
    log_w = normal(0.0, 1.0).log_prob(a) - q_a + ratio
    total = 0.0
    for x in X:
        joint = q_a + q_b + log_w + normal(a + b, 1.0).log_prob(torch.tensor(x))
        total += joint.flatten().logsumexp(0) + 2 * math.log(14 / (num - 1))
    return total


@pytest.mark.parametrize(
    ("objective", "vectorize"),
    [
        ("sis", True),
        pytest.param("ais", True, marks=pytest.mark.slow),
        pytest.param("sis", False, marks=pytest.mark.slow),
    ],
)
def test_a_scale_that_is_drawn_moves_with_the_chain(objective, vectorize):
    # A guide whose sites depend on each other through scales is no mean-field guide.
    model, guide = drawn(scaled)
    count, particles = (8, 100) if vectorize else (6, 5)
    elbo = CHAINS[objective](num_particles=particles, vectorize_particles=vectorize)
    bounds = torch.tensor([-elbo.loss(model, guide) for _ in range(count)])
    error = bounds.std() / count**0.5
    exact = scaled_evidence()
    assert bounds.mean() < exact + 4 * error
    assert bounds.mean() > exact - 4 * error - (0.1 if vectorize else 2.0)


@pytest.mark.parametrize("objective", CHAINS)
def test_chains_refuse_masks_that_are_drawn(objective):
    with pytest.raises(ValueError, match="mask of site 'b' of the guide depends on a"):
        CHAINS[objective]().loss(*drawn(masked))


@pytest.mark.parametrize("how", [pytest.param("scale", marks=pytest.mark.slow), "mask"])
def test_a_factor_belongs_to_the_latents_that_scale_or_mask_it(how):
    def model():
        with pyro.plate("data", 3):
            a = pyro.sample("a", dist.Normal(0.0, 1.0))
        total = a.sum(-1, keepdim=a.dim() > 1)
        around = poutine.scale(scale=total.sigmoid()) if how == "scale" else masked(total)
        with around:
            pyro.sample("y", dist.Normal(0.0, 1.0), obs=torch.tensor(2.0))

    def guide():
        with pyro.plate("data", 3):
            pyro.sample("a", dist.Normal(0.5, 1.2))

    for vectorize in (False, True):
        elbo = TraceIWAE_ELBO(3, vectorize_particles=vectorize)
        assert elbo.bounds(model, guide).plates == ()  # one weight: the data share a factor
    with pyro.validation_enabled(False):
        losses = torch.stack(
            [
                torch.tensor([TraceIWAE_ELBO(3, joint=j).loss(model, guide) for _ in range(16)])
                for j in (False, True)
            ]
        )
    error = (losses.var(1).sum() / 16).sqrt()
    assert abs(losses.mean(1).diff()) < 4 * error


class UnseenDraw:
    """
    A guide that draws a bit by itself and says its density by a factor, beside a site as usual.

    Everything is enumerated: the ELBO, and the bound of two particles.
    """

    size = 1000

    def __init__(self):
        self.x = torch.tensor(1.3)
        self.start = {"b": torch.tensor(0.4), "c": torch.tensor(0.7)}

    def model(self):
        with pyro.plate("data", self.size):
            b = pyro.sample("b", dist.Bernoulli(0.3))
            c = pyro.sample("c", dist.Bernoulli(0.5))
            pyro.sample("x", dist.Normal(b + 2 * c, 1.0), obs=self.x.expand(self.size))

    def guide(self):
        unit = constraints.unit_interval
        prob = {n: pyro.param(f"{n}_prob", v, constraint=unit) for n, v in self.start.items()}
        with pyro.plate("data", self.size):
            bit = (torch.rand(self.size) < prob["b"]).to(self.x)
            pyro.sample("b", dist.Delta(bit))
            pyro.factor("density", dist.Bernoulli(prob["b"]).log_prob(bit), has_rsample=False)
            pyro.sample("c", dist.Bernoulli(prob["c"]))

    def exact_gradient(self, num_particles):
        """Per datum, with respect to the unconstrained parameters."""
        logits = {n: v.logit().requires_grad_() for n, v in self.start.items()}
        bits = torch.tensor([0.0, 1.0])
        b, c = torch.meshgrid(bits, bits, indexing="ij")
        log_q = dist.Bernoulli(logits=logits["b"]).log_prob(b)
        log_q = (log_q + dist.Bernoulli(logits=logits["c"]).log_prob(c)).flatten()
        log_p = dist.Bernoulli(torch.tensor(0.3)).log_prob(b) + math.log(0.5)
        log_w = (log_p + dist.Normal(b + 2 * c, 1.0).log_prob(self.x)).flatten() - log_q
        bound, q = log_w, log_q.exp()
        if num_particles == 2:
            bound = torch.logaddexp(log_w[:, None], log_w) - math.log(2.0)
            q = q[:, None] * q
        grads = torch.autograd.grad((q * bound).sum(), list(logits.values()))
        return dict(zip(logits, grads, strict=True))


@pytest.mark.parametrize(
    "objective", ["sgvb", "iwae 1", "iwae 2", "iwae 2 at once", "rb", "rb sampled"]
)
def test_a_factor_of_the_guide_stands_for_draws_that_are_not_seen(objective):
    programs = UnseenDraw()
    elbo = {
        "sgvb": lambda: TraceSGVB_ELBO(),
        "iwae 1": lambda: TraceIWAE_ELBO(1),
        "iwae 2": lambda: TraceIWAE_ELBO(2),
        "iwae 2 at once": lambda: TraceIWAE_ELBO(2, vectorize_particles=True),
        "rb": lambda: TraceRaoBlackwell_ELBO(2, num_samples=0),
        "rb sampled": lambda: TraceRaoBlackwell_ELBO(0, num_samples=1),
    }[objective]()
    result = []
    for _ in range(24):
        elbo.loss_and_grads(programs.model, programs.guide)
        params = dict(pyro.get_param_store().named_parameters())
        result.append({n: -params[f"{n}_prob"].grad / programs.size for n in programs.start})
        for p in params.values():
            p.grad = None
    for name, exact in programs.exact_gradient(2 if "iwae 2" in objective else 1).items():
        assert abs(exact) > 0.03
        assert_mean(torch.stack([step[name] for step in result]), exact)


@pytest.mark.parametrize("has_rsample", [False, True])
def test_a_factor_of_the_guide_counts_as_under_trace_enum(has_rsample):
    # The classification loss of Pyro's scANVI: of no draw, and learned.
    def model():
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Bernoulli(0.5))
            pyro.sample("x", dist.Normal(z, 1.0), obs=torch.ones(3))

    def guide():
        logits = pyro.param("logits", torch.tensor([1.5, -0.2]))
        with pyro.plate("data", 3):
            pyro.sample("z", dist.Bernoulli(logits=logits[0]), infer={"enumerate": "parallel"})
            value = dist.Bernoulli(logits=logits[1]).log_prob(torch.ones(3))
            pyro.factor("classification", -0.7 * value, has_rsample=has_rsample)

    grads, losses = [], []
    for elbo in (TraceEnum_ELBO(max_plate_nesting=1), TraceRaoBlackwell_ELBO(2, num_samples=0)):
        losses.append(elbo.loss_and_grads(model, guide))
        param = dict(pyro.get_param_store().named_parameters())["logits"]
        grads.append(param.grad)
        param.grad = None
    assert math.isclose(*losses, rel_tol=1e-9)
    assert torch.allclose(*grads)
    assert (grads[0].abs() > 0.1).all()


class Level(ForecastingModel):
    """A random walk around a level."""

    def model(self, zero_data, covariates):
        level = pyro.sample("level", dist.Normal(0.0, 1.0))
        with self.time_plate:
            noise = pyro.sample("noise", dist.Normal(0.0, 0.1))
        self.predict(dist.Normal(0.0, 0.5), (level + noise.cumsum(-1)).unsqueeze(-1))


@pytest.mark.parametrize("elbo", [TraceSGVB_ELBO, TraceIWAE_ELBO, TraceSIS_ELBO])
def test_a_forecaster_sets_the_nesting_of_its_loss(elbo, monkeypatch):
    monkeypatch.setattr(forecaster, "Trace_ELBO", elbo)
    data = torch.linspace(0, 1, 6).unsqueeze(-1)
    fitted = Forecaster(Level(), data, torch.zeros(6, 0), num_steps=3, log_every=0)
    assert fitted(data, torch.zeros(8, 0), num_samples=5).shape == (5, 2, 1)
