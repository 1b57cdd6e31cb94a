"""RenyiELBO(alpha=0) is Pyro's importance weighted bound; each test shows where ours is correct."""

import functools

import pytest
import torch
from pyro.infer import RenyiELBO

from pyro_mcvae import TraceIWAE_ELBO
from tests.estimates import assert_mean, gradients, take_gradients, values
from tests.models import ConjugateGaussian, DiscreteMixture


def both(vectorize, num_particles):
    shared = {"num_particles": num_particles, "vectorize_particles": vectorize}
    return TraceIWAE_ELBO(**shared), RenyiELBO(alpha=0, **shared)


@functools.cache
def bound_of_all_data():
    return values(both(True, 20)[0], ConjugateGaussian(N=100), 60).mean()


@pytest.mark.parametrize(("size", "vectorize"), [(100, True), (10, True), (10, False)])
def test_minibatches_keep_the_bound_below_the_evidence(size, vectorize):
    exact = ConjugateGaussian(N=100, subsample_size=size)
    ours, theirs = both(vectorize, num_particles=20)
    count = 40 if vectorize else 12
    bound = values(ours, exact, count)
    error = bound.std() / count**0.5
    evidence = exact.log_evidence()
    assert bound.mean() < evidence + 3 * error
    # A bound, and the same tight one at every minibatch size: 20 particles are worth a nat here.
    assert abs(bound.mean() - bound_of_all_data()) < 4 * error + 0.2
    if size < 100:
        # Theirs multiplies N/B into the weights and rises far above the evidence.
        assert values(theirs, exact, count).mean() > evidence + 5


@pytest.mark.parametrize("vectorize", [False, True])
def test_a_discrete_guide_gets_the_exact_gradient(vectorize):
    copies, count = 40, 30  # the same three data many times: as many draws in one step
    exact = DiscreteMixture(N=3 * copies, C=3)
    exact.x = exact.x[:3].repeat(copies)
    logits = torch.tensor([[0.5, 0.0, -0.5], [0.0, 0.3, 0.0], [-0.4, 0.2, 0.1]])
    exact.set_guide(guide_logits=logits.repeat(copies, 1))
    ours, theirs = both(vectorize, num_particles=2)
    target = exact.grad(exact.iwae_per_datum, 2)
    result = gradients(ours, exact, count)
    result["guide_logits"] = result["guide_logits"].reshape(count, copies, 3, 3).mean(1)
    target["guide_logits"] = target["guide_logits"][:3]
    for name, samples in result.items():
        assert_mean(samples, target[name])
        assert (target[name].abs() > 9 * samples.std(0) / count**0.5).any()
    # Pyro multiplies the score-function term by alpha / (1 - alpha) = 0.
    theirs.loss_and_grads(exact.model, exact.guide)
    assert (take_gradients(exact)["guide_logits"] == 0).all()
    assert (target["guide_logits"].abs() > 0.02).any()
