"""A minibatch that the model is given, and the one that the guide's latents are for."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal

from pyro_mcvae import (
    CompiledELBO,
    MonteCarloEM,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
    WakeSleep,
    log_evidence,
)

N = 6
X, SHIFT = torch.linspace(-5.0, 5.0, N), torch.arange(6.0)
LOSSES = {
    "sgvb": TraceSGVB_ELBO,
    "iwae": lambda: TraceIWAE_ELBO(3),
    "looped": lambda: TraceIWAE_ELBO(3, vectorize_particles=False),
    "sis": lambda: TraceSIS_ELBO(2),
    "ais": lambda: TraceAIS_ELBO(2),
    "rb": TraceRaoBlackwell_ELBO,
    "compiled": lambda: CompiledELBO(TraceIWAE_ELBO(3), "eager"),
    "mcem": lambda: MonteCarloEM(1),
    "wake-sleep": lambda: WakeSleep(),
}


def model(index):
    with pyro.plate("data", N, subsample=index) as i:
        z = pyro.sample("z", dist.Normal(SHIFT[i], 1.0))
        pyro.sample("x", dist.Normal(z, 1.0), obs=X[index])


def plates(index):
    return pyro.plate("data", N, subsample=index)


@pytest.mark.parametrize("name", LOSSES)
def test_latents_of_other_data_are_refused(name):
    """Without create_plates an AutoGuide draws its own minibatch, which Pyro uses for both."""
    pyro.set_rng_seed(0)
    guide, loss = AutoNormal(model), LOSSES[name]()
    guide(torch.tensor([0, 5]))
    with pytest.raises(ValueError, match=r"'data' of the model has the minibatch \[0, 5\]"):
        loss.loss_and_grads(model, guide, torch.tensor([0, 5]))


def test_judges_refuse_them_too():
    pyro.set_rng_seed(0)
    guide = AutoNormal(model)
    guide(torch.tensor([0, 5]))
    with pytest.raises(ValueError, match="pass the same subsample= in the guide"):
        log_evidence(model, guide, torch.tensor([0, 5]), num_particles=10)


@pytest.mark.parametrize("name", ["sgvb", "looped", "compiled"])
def test_each_datum_meets_its_own_latent(name):
    guide, loss = AutoNormal(model, create_plates=plates, init_scale=0.5**0.5), LOSSES[name]()
    guide(torch.tensor([0, 5]))
    guide.locs.z.data = (X + SHIFT) / 2
    index = torch.tensor([4, 1])
    exact = dist.Normal(SHIFT, 2**0.5).log_prob(X)[index].sum() * N / 2
    for _ in range(3):
        assert loss.loss(model, guide, index) == pytest.approx(-float(exact), rel=1e-6)


@pytest.mark.parametrize("kind", [list, torch.clone, torch.Tensor.numpy])
def test_equal_indices_agree_whatever_holds_them(kind):
    def guide(index):
        with pyro.plate("data", N, subsample=index) as i:
            pyro.sample("z", dist.Normal((X + SHIFT)[i] / 2, 0.5**0.5))

    index = torch.tensor([4, 1])
    exact = dist.Normal(SHIFT, 2**0.5).log_prob(X)[index].sum() * N / 2

    def other(index):
        with pyro.plate("data", N, subsample=kind(index)) as i:
            z = pyro.sample("z", dist.Normal(SHIFT[i], 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=X[i])

    assert TraceIWAE_ELBO(3).loss(other, guide, index) == pytest.approx(-float(exact), rel=1e-6)


@pytest.mark.parametrize("name", ["sgvb", "iwae", "looped", "rb", "compiled"])
def test_a_model_may_choose_in_each_run_where_no_latent_is_concerned(name):
    """Of the data alone, as by a regression that draws its rows by itself."""

    def regression():
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        rows = torch.randperm(N)[:2]
        with pyro.plate("data", N, subsample=rows) as i:
            pyro.sample("x", dist.Normal(w, 1.0), obs=X[i])

    def guide():
        pyro.sample("w", dist.Normal(pyro.param("loc", torch.tensor(0.0)), 0.5))

    loss = LOSSES[name]()
    for _ in range(3):
        loss.loss_and_grads(regression, guide)
