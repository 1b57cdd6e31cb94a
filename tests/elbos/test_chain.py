"""What SIS and AIS share: the ways to the same gradient, the record of a step, bad input."""

from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_mcvae import (
    HMC,
    MALA,
    ULA,
    AdaptiveStepSize,
    LearnedSchedule,
    MonteCarloEM,
    RandomWalk,
    TraceAIS_ELBO,
    TraceSIS_ELBO,
    UnderdampedLangevin,
)
from tests.estimates import take_gradients
from tests.models import (
    NestedGaussian,
    ProbabilisticPCA,
)

CHAINS = {
    "ula": lambda **k: TraceSIS_ELBO(3, ULA(0.05), **k),
    "underdamped": lambda **k: TraceSIS_ELBO(3, UnderdampedLangevin(0.2), **k),
    "mala": lambda **k: TraceAIS_ELBO(3, MALA(0.05), **k),
    "latent": lambda **k: TraceSIS_ELBO(3, ULA(0.01), coordinates="latent", **k),
}
chains = pytest.mark.parametrize("chain", CHAINS)


@chains
def test_a_step_leaves_a_detached_record(chain):
    exact = NestedGaussian(G=3, M=2)
    elbo = CHAINS[chain](num_particles=4, vectorize_particles=True)
    assert elbo.last_step is None
    elbo.loss_and_grads(exact.model, exact.guide)
    record = elbo.last_step
    # AIS's last move would change nothing, and is left out.
    assert record.acceptance.shape == (2 if chain == "mala" else 3,)
    assert ((record.acceptance > 0) & (record.acceptance <= 1)).all()
    assert record.log_weight.shape == (4, 3)
    assert record.effective_sample_size.shape == (3,)
    assert record.betas.tolist() == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert not any(
        t.requires_grad for t in (record.acceptance, record.step_size, record.log_weight)
    )


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        return z.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad


def test_a_model_that_is_differentiable_once_is_refused_with_the_remedy():
    def model(x):
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(Once.apply(z) ** 2, 1.0), obs=x)

    def guide(x):
        loc = pyro.param("loc", torch.zeros(3))
        with pyro.plate("data", 3):
            pyro.sample("z", dist.Normal(loc, 1.0))

    x = torch.tensor([-1.0, 0.0, 1.0])
    with pytest.raises(RuntimeError, match=r"differentiated twice.*reweighted"):
        TraceSIS_ELBO(2, ULA(0.1)).loss_and_grads(model, guide, x)
    TraceSIS_ELBO(2, ULA(0.1), gradient_estimator="reweighted").loss_and_grads(model, guide, x)
    assert pyro.param("loc").grad.isfinite().all()


def discrete(x):
    with pyro.plate("data", 3):
        pyro.sample("z", dist.Bernoulli(pyro.param("p", torch.tensor(0.3))))


def test_discrete_sites_are_named_with_the_remedy():
    with pytest.raises(ValueError, match=r"site 'z' is discrete.*TraceRaoBlackwell_ELBO"):
        MonteCarloEM().loss_and_grads(discrete, discrete, torch.zeros(3))


ROUGH = {
    "VonMises": lambda loc: dist.VonMises(loc, 1.0),
    "Normal": lambda loc: dist.Normal(loc, 1.0).has_rsample_(False),
}


@pytest.mark.parametrize("kind", ROUGH)
@pytest.mark.parametrize(
    ("coordinates", "estimator", "vectorize"),
    [("noise", "reparam", False), ("latent", "reweighted", True)],
)
def test_draws_without_gradient_are_named_with_the_remedy(kind, coordinates, estimator, vectorize):
    def program():
        pyro.sample("a", ROUGH[kind](pyro.param("loc", torch.tensor(0.3))))

    elbo = TraceSIS_ELBO(
        2,
        ULA(0.01),
        num_particles=2,
        coordinates=coordinates,
        gradient_estimator=estimator,
        vectorize_particles=vectorize,
    )
    with pytest.raises(ValueError, match=rf"site 'a' is not reparam.*\({kind}\).*TraceIWAE_ELBO"):
        elbo.loss_and_grads(program, program)
    with torch.no_grad():  # The bound itself takes them.
        assert abs(elbo.loss(program, program)) < 1.0


def test_chains_that_diverge_are_reported():
    exact = ProbabilisticPCA()
    elbo = TraceSIS_ELBO(50, ULA(1e30))
    with pytest.raises(ValueError, match="smaller step size"):
        elbo.loss_and_grads(exact.model, exact.guide)


@pytest.mark.parametrize("step", [1e3, 1e30])
@pytest.mark.parametrize("kernel", [MALA, HMC])
def test_moves_that_diverge_are_rejected(kernel, step):
    exact = ProbabilisticPCA()
    elbo = TraceAIS_ELBO(4, kernel(step), vectorize_particles=True)
    pyro.set_rng_seed(1)
    loss = elbo.loss_and_grads(exact.model, exact.guide)
    assert (elbo.last_step.acceptance == 0).all()
    gradients = take_gradients(exact)
    pyro.set_rng_seed(1)
    plain = TraceAIS_ELBO(1, vectorize_particles=True)
    # Nothing moved: it is the ELBO, value and gradient.
    assert plain.loss_and_grads(exact.model, exact.guide) == pytest.approx(loss, rel=1e-9)
    for name, value in take_gradients(exact).items():
        assert torch.allclose(gradients[name], value, rtol=1e-7), name


LOWEST = torch.tensor([-9.0, 1.9, -9.0])
FORBIDDEN = -1e5


def above(z):
    return (z - LOWEST).clamp(min=1e-9)


BARRIERS = {
    "zero density": (
        lambda z, w: w * (z - LOWEST).log().nan_to_num(nan=-torch.inf),
        lambda z, w: torch.where(z > LOWEST, w * above(z).log(), FORBIDDEN),
    ),
    "no gradient": (
        lambda z, w: torch.where(z > LOWEST, w * (z - LOWEST).sqrt(), FORBIDDEN),
        lambda z, w: torch.where(z > LOWEST, w * above(z).sqrt(), FORBIDDEN),
    ),
}
ADJUSTED = {
    "mala": lambda: MALA(10.0),
    "hmc": lambda: HMC(1.0, num_leapfrog=1),
    "walk": lambda: RandomWalk(4.0),
}


@pytest.mark.parametrize(
    ("kernel", "barrier", "vectorize"),
    [
        (k, b, (i + j) % 2 == 0)
        for i, k in enumerate(ADJUSTED)
        for j, b in enumerate(BARRIERS)
        if (k, b) != ("walk", "no gradient")  # which a random walk does not look at
    ],
)
def test_a_move_to_where_something_is_not_finite_is_rejected(kernel, barrier, vectorize):
    """Like one to a density so low that nobody goes there, whose derivatives all exist."""

    def guide():
        loc = pyro.param("loc", torch.tensor([1.0, 2.0, 0.5]))
        with pyro.plate("data", 3):
            pyro.sample("z", dist.Normal(loc, 0.02))

    result = []
    for factor in BARRIERS[barrier]:

        def model(factor=factor):
            w = pyro.param("w", torch.tensor(1.0))
            with pyro.plate("data", 3):
                z = pyro.sample("z", dist.Normal(0.0, 1.0))
                pyro.factor("barrier", factor(z, w))
                pyro.sample("x", dist.Normal(w * z, 1.0), obs=torch.zeros(3))

        elbo = TraceAIS_ELBO(
            kernel=ADJUSTED[kernel](),
            schedule=LearnedSchedule(4),
            num_particles=6,
            vectorize_particles=vectorize,
        )
        pyro.set_rng_seed(1)
        loss = elbo.loss_and_grads(model, guide)
        assert (elbo.last_step.acceptance < 1).all()
        result.append([torch.tensor(loss)])
        for p in (pyro.param("w"), pyro.param("loc"), elbo.schedule.logits):
            result[-1].append(p.grad.clone())
            p.grad = None
    for one, other in zip(*result, strict=True):
        assert torch.allclose(one, other, rtol=1e-9), (one, other)


@pytest.mark.parametrize("estimator", ["reparam", "reweighted"])
def test_factors_of_the_guide_that_hide_draws_are_refused(estimator):
    weight = torch.tensor(0.3, requires_grad=True)

    def model(x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def guide(x, reparameterized):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(x * weight, 1.0))
            pyro.factor("penalty", weight * x, has_rsample=reparameterized)

    x = torch.tensor([0.4, -1.0])
    elbo = TraceSIS_ELBO(2, ULA(0.1), gradient_estimator=estimator)
    elbo.loss_and_grads(model, partial(guide, reparameterized=True), x)
    with pytest.raises(ValueError, match=r"factor 'penalty' has has_rsample=False"):
        elbo.loss_and_grads(model, partial(guide, reparameterized=False), x)


def decoder_pair():
    weight = torch.randn(4, 16)
    x = (torch.randn(20, 4) @ weight).sigmoid().bernoulli()

    def model():
        with pyro.plate("data", 20):
            z = pyro.sample("z", dist.Normal(torch.zeros(4), 1.0).to_event(1))
            pyro.sample("x", dist.Bernoulli(logits=3 * z @ weight).to_event(1), obs=x)

    def guide():
        loc = pyro.param("loc", torch.zeros(20, 4))
        with pyro.plate("data", 20):
            pyro.sample("z", dist.Normal(loc, 0.3).to_event(1))

    return model, guide


@pytest.mark.parametrize(
    ("elbo", "warns"),
    [
        (lambda: TraceSIS_ELBO(4, ULA(3.0)), True),
        (lambda: TraceSIS_ELBO(4, ULA(3.0), defensive=0.01), True),
        (lambda: TraceAIS_ELBO(4, MALA(3.0)), True),
        (lambda: MonteCarloEM(2, MALA(3.0)), True),
        (lambda: TraceSIS_ELBO(4, ULA(0.01)), False),
        (lambda: TraceSIS_ELBO(4), False),
        (lambda: TraceAIS_ELBO(4, MALA(AdaptiveStepSize(0.5))), False),
    ],
)
def test_moves_that_go_too_far_are_warned_of_once(elbo, warns, caplog):
    both, loss = decoder_pair(), elbo()
    for _ in range(10):
        loss.loss_and_grads(*both)
    lines = [r.getMessage() for r in caplog.records if "go too far" in r.getMessage()]
    assert len(lines) == warns
    if warns:
        assert "acceptance of a transition is 0.00" in lines[0]
        assert "step size is 3: use a smaller one, or AdaptiveStepSize()" in lines[0]


@pytest.mark.parametrize(
    ("scale", "match"),
    [
        (lambda z: z.exp(), "to which TraceSIS_ELBO has moved: use a smaller step size"),
        (
            lambda z: 1e-3 + z.cosh(),
            r"site 'x' of the model.*\n.*moves of TraceSIS_ELBO go too far.* size is 1e\+08",
        ),
    ],
)
def test_errors_after_moves_that_go_too_far_name_the_step_size(scale, match):
    def model():
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(0.0, scale(z)), obs=torch.ones(3))

    def guide():
        with pyro.plate("data", 3):
            pyro.sample("z", dist.Normal(pyro.param("loc", torch.zeros(3)), 0.5))

    loss = TraceSIS_ELBO(2, ULA(1e8), coordinates="latent", defensive=0.01)
    with pytest.raises(ValueError, match=match):
        loss.loss_and_grads(model, guide)
