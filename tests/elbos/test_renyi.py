"""The Rényi bound of any order: its values, its gradients, and where Pyro's is right."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import RenyiELBO

from pyro_mcvae import TraceIWAE_ELBO, TraceRenyi_ELBO, TraceSGVB_ELBO
from tests.estimates import assert_mean, gradients, take_gradients, values
from tests.models import ConjugateGaussian, DiscreteMixture

orders = pytest.mark.parametrize("alpha", [0.0, 0.5, 2.0])


def exact_gradient(exact, alpha, num_particles=2):
    return exact.grad(
        lambda K, params=None: exact.iwae_per_datum(K, params, alpha=alpha), num_particles
    )


@orders
@pytest.mark.parametrize("make", [ConjugateGaussian, DiscreteMixture])
def test_value_is_the_exact_expectation(make, alpha):
    exact = make(N=250)
    elbo = TraceRenyi_ELBO(alpha, 2, vectorize_particles=True)
    result = torch.stack([elbo.bounds(exact.model, exact.guide).per_datum for _ in range(20)])
    assert_mean((result - exact.iwae_per_datum(2, alpha=alpha)).sum(-1), 0.0)


@pytest.mark.parametrize(
    ("alpha", "size", "vectorize"),
    [(0.0, None, False), (0.5, None, True), (2.0, 60, True)],
)
def test_gradient_is_exact_for_a_discrete_guide(size, alpha, vectorize):
    copies, count = 40, 40  # the same three data many times: as many draws in one step
    exact = DiscreteMixture(N=3 * copies, C=3, subsample_size=size)
    exact.x = exact.x[:3].repeat(copies)
    logits = torch.tensor([[0.5, 0.0, -0.5], [0.0, 0.3, 0.0], [-0.4, 0.2, 0.1]])
    exact.set_guide(guide_logits=logits.repeat(copies, 1))
    elbo = TraceRenyi_ELBO(alpha, 2, vectorize_particles=vectorize)
    result, target = gradients(elbo, exact, count), exact_gradient(exact, alpha)
    result["guide_logits"] = result["guide_logits"].reshape(count, copies, 3, 3).mean(1)
    target["guide_logits"] = target["guide_logits"][:3]
    for name, samples in result.items():
        assert_mean(samples, target[name])
        assert (target[name].abs() > 6 * samples.std(0) / count**0.5).any()
    if alpha == 0.0:  # Pyro multiplies the score-function term by alpha / (1 - alpha)
        RenyiELBO(0, 2).loss_and_grads(exact.model, exact.guide)
        assert (take_gradients(exact)["guide_logits"] == 0).all()


@orders
@pytest.mark.parametrize(
    ("estimator", "num_particles"), [("stl", 1), ("stl", 3), ("dreg", 1), ("dreg", 3)]
)
def test_an_exact_guide_has_no_gradient_noise(estimator, num_particles, alpha):
    exact = ConjugateGaussian(N=10)
    exact.set_guide("exact")
    elbo = TraceRenyi_ELBO(alpha, num_particles, gradient_estimator=estimator)
    for samples in gradients(elbo, exact, 3).values():
        assert (samples.abs() < 1e-9).all()


@orders
def test_full_data_with_one_weight_are_those_of_pyro(alpha):
    x = torch.tensor([-0.5, 0.5, 2.0])

    def model():
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 3):
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def guide():
        loc = pyro.param("loc", torch.tensor(0.3))
        pyro.sample("z", dist.Normal(loc, 0.8))

    results = []
    for elbo in (TraceRenyi_ELBO(alpha, 5, gradient_estimator="reparam"), RenyiELBO(alpha, 5)):
        elbo.loss(model, guide)  # ours finds out about the programs
        pyro.set_rng_seed(1)
        loss = elbo.loss_and_grads(model, guide)
        loc = pyro.param("loc").unconstrained()
        results.append(torch.stack([torch.as_tensor(loss), loc.grad]))
        loc.grad = None
    torch.testing.assert_close(*results)


def test_orders_are_sorted_between_the_bounds_that_they_contain():
    exact = ConjugateGaussian(N=100)
    result = []
    for alpha in (0.0, 0.5, 1 - 1e-6):
        pyro.set_rng_seed(0)
        result.append(-TraceRenyi_ELBO(alpha, 5).loss(exact.model, exact.guide))
    pyro.set_rng_seed(0)
    iwae = -TraceIWAE_ELBO(5).loss(exact.model, exact.guide)
    pyro.set_rng_seed(0)
    elbo = -TraceSGVB_ELBO(5, analytic_kl=False).loss(exact.model, exact.guide)
    assert result[0] == iwae > result[1] > result[2]
    assert abs(result[2] - elbo) < 1e-3


def test_minibatches_keep_the_bound_below_the_evidence():
    """Pyro multiplies N/B into the weights and rises far above it."""
    exact = ConjugateGaussian(N=100, subsample_size=10)
    bound = values(TraceIWAE_ELBO(20), exact, 40)
    theirs = values(RenyiELBO(0, 20, vectorize_particles=True), exact, 40)
    evidence, error = exact.log_evidence(), bound.std() / 40**0.5
    assert bound.mean() < evidence + 3 * error
    assert bound.mean() > evidence - 4 * error - 2  # what 20 particles leave
    assert theirs.mean() > evidence + 5
