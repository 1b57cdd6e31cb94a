"""Models whose only latents are summed: every objective and evaluator has the exact evidence."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoDelta

import pyro_mcvae as mc
from tests.cases import every

PARALLEL = {"enumerate": "parallel"}
X = torch.tensor([[-0.7, 0.4, 1.9, 0.3], [0.2, -1.0, 2.2, 1.1], [1.4, 0.1, -0.6, 0.8]]).double()
PRIOR = torch.tensor([0.3, 0.7], dtype=torch.float64)
STAY = torch.tensor([[0.8, 0.2], [0.4, 0.6]], dtype=torch.float64)


def means():
    return pyro.param("means", lambda: torch.tensor([-0.5, 1.0]))


def mixture(x=X[:, 0], rows=None):
    with pyro.plate("data", len(x), subsample=rows) as index:
        y = pyro.sample("y", dist.Categorical(PRIOR), infer=PARALLEL)
        pyro.sample("x", dist.Normal(means()[y], 0.8), obs=x[index])


def hmm(x=X, rows=None):
    with pyro.plate("sequences", len(x), subsample=rows) as index:
        y = 0
        for t in pyro.markov(range(4)):
            y = pyro.sample(f"y_{t}", dist.Categorical(STAY[y]), infer=PARALLEL)
            pyro.sample(f"x_{t}", dist.Normal(means()[y], 0.8), obs=x[index, t])


def guide(*args):
    pass


def log_mixture(means):
    return (PRIOR.log() + dist.Normal(means, 0.8).log_prob(X[:, :1])).logsumexp(-1)


def log_hmm(means):
    """The forward algorithm, begun at a state 0 before the first."""
    alpha = torch.tensor([0.0, -math.inf]).expand(3, 2)
    for t in range(4):
        alpha = (alpha.unsqueeze(-1) + STAY.log()).logsumexp(-2)
        alpha = alpha + dist.Normal(means, 0.8).log_prob(X[:, t : t + 1])
    return alpha.logsumexp(-1)


EXACT = {"mixture": (mixture, log_mixture), "hmm": (hmm, log_hmm)}
OBJECTIVES = {
    "SGVB": mc.TraceSGVB_ELBO,
    "IWAE": lambda: mc.TraceIWAE_ELBO(3),
    "Rao-Blackwell": mc.TraceRaoBlackwell_ELBO,
    "SIS": lambda: mc.TraceSIS_ELBO(3),
    "SIS, latent": lambda: mc.TraceSIS_ELBO(3, coordinates="latent"),
    "SIS, reweighted": lambda: mc.TraceSIS_ELBO(3, gradient_estimator="reweighted"),
    "AIS": lambda: mc.TraceAIS_ELBO(3),
    "AIS, several": lambda: mc.TraceAIS_ELBO(3, mc.HMC(), num_particles=4, multi_sample=True),
    "Monte Carlo EM": mc.MonteCarloEM,
    "Monte Carlo EM, several": lambda: mc.MonteCarloEM(2, mc.MALA(), persistent=True),
}


@pytest.mark.parametrize(
    ("name", "objective"), every(3, [(list(EXACT)[i % 2], o) for i, o in enumerate(OBJECTIVES)])
)
def test_the_bound_is_the_evidence(name, objective):
    model, exact = EXACT[name]
    elbo = OBJECTIVES[objective]()
    bounds = elbo.bounds(model, guide)
    at = means().detach().requires_grad_()
    evidence = exact(at)
    evidence.sum().backward()
    assert torch.allclose(bounds.per_datum, evidence)
    assert bounds.shared == 0
    assert math.isclose(elbo.loss_and_grads(model, guide), -evidence.sum().item())
    assert torch.allclose(means().grad, -at.grad)
    if hasattr(elbo, "last_step"):
        assert len(elbo.last_step.acceptance) == 0  # no chain
        assert elbo.kernel.step_size().item() == type(elbo.kernel)().step_size().item()


@pytest.mark.parametrize("objective", ["SGVB", "IWAE", "SIS", "AIS"])
def test_minibatches_are_scaled_outside(objective):
    elbo, rows = OBJECTIVES[objective](), torch.tensor([2, 0])
    loss = elbo.loss(mixture, guide, X[:, 0], rows)
    bounds = elbo.bounds(mixture, guide, X[:, 0], rows)
    exact = log_mixture(means()).detach()[rows]
    assert torch.allclose(bounds.per_datum, exact)
    assert math.isclose(loss, -1.5 * exact.sum().item())


def test_draws_are_those_of_the_states():
    draws = mc.refine(mixture, guide, num_samples=4000, num_particles=2, schedule=2)
    logits = PRIOR.log() + dist.Normal(means(), 0.8).log_prob(X[:, :1])
    exact = logits.softmax(-1)[:, 1].detach()
    error = (exact * (1 - exact) / 4000).sqrt()
    assert ((draws["y"].double().mean(0) - exact).abs() < 4 * error).all()


def test_point_masses_are_no_exact_sum():
    def model():
        pyro.sample("shift", dist.Normal(0.0, 1.0))
        mixture()

    delta = AutoDelta(poutine.block(model, hide=["y"]))
    delta()
    with pytest.raises(ValueError, match="its site 'shift' is a point mass"):
        mc.log_evidence(model, delta)
    with pytest.raises(ValueError, match="its site 'shift' is a point mass"):
        mc.TraceSIS_ELBO(2).loss(model, delta)


@pytest.mark.parametrize("points", [("m", "z"), ("m",)], ids=["all", "global"])
def test_particles_of_point_masses_are_named_as_no_bound(points, caplog):
    """log p(x, z) at the mode lies above log p(x); a guide that draws as well is weighed."""

    def model():
        m = pyro.sample("m", dist.Normal(0.0, 0.05))
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Normal(m, 0.05))
            pyro.sample("x", dist.Normal(z, 1.0), obs=X[:, 0])

    def guide():
        pyro.sample("m", dist.Delta(torch.zeros(())))
        with pyro.plate("data", 3):
            fn = dist.Delta(torch.zeros(3)) if "z" in points else dist.Normal(torch.zeros(3), 0.05)
            pyro.sample("z", fn)

    result = {}
    for make in (mc.TraceSGVB_ELBO, lambda: mc.TraceIWAE_ELBO(1), lambda: mc.TraceIWAE_ELBO(4)):
        caplog.clear()
        loss = make()
        result[type(loss).__name__, loss.num_particles] = loss.loss(model, guide)
        named = "not a bound on log p(x). TraceSGVB_ELBO" in caplog.text
        assert named == (points == ("m", "z") and loss.num_particles > 1)
    if "z" in points:
        covariance = 0.0025 * torch.ones(3, 3) + 1.0025 * torch.eye(3)
        exact = dist.MultivariateNormal(torch.zeros(3), covariance).log_prob(X[:, 0])
        assert len({round(v, 9) for v in result.values()}) == 1
        assert -result["TraceIWAE_ELBO", 4] > exact + 5
