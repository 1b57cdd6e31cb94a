"""Learned parts of an objective and Pyro's parameter store."""

import copy

import pyro
import pyro.distributions as dist
import pyro.optim
import torch
from pyro.infer import SVI

from pyro_mcvae import LearnedSchedule, TraceSIS_ELBO


def test_learned_parts_that_were_loaded_into_the_store_go_on_learning(tmp_path):
    """Pyro's own way of saving: the store, and the optimizer."""

    def begin():
        loss = TraceSIS_ELBO(schedule=LearnedSchedule(3))
        loss.param_name = "schedule"  # as in another process

        def model():
            with pyro.plate("data", 3):
                z = pyro.sample("z", dist.Normal(0.0, 1.0))
                pyro.sample("x", dist.Normal(z, 0.3), obs=torch.tensor([1.0, 2.0, 3.0]))

        def guide():
            with pyro.plate("data", 3):
                pyro.sample("z", dist.Normal(pyro.param("loc", torch.zeros(3)), 1.0))

        return SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), loss=loss), loss

    svi, loss = begin()
    for _ in range(5):
        svi.step()
    betas = loss.schedule().detach()
    assert not torch.allclose(betas, torch.linspace(0, 1, 4), atol=1e-3)
    pyro.get_param_store().save(tmp_path / "store")
    pyro.clear_param_store()
    pyro.get_param_store().load(tmp_path / "store")

    svi, loss = begin()
    svi.step()
    # Before its first step was over it had the values that were loaded.
    assert torch.allclose(loss.last_step.betas, betas)
    for _ in range(5):
        svi.step()
    assert not torch.allclose(loss.schedule(), betas, atol=1e-3)
    assert loss.schedule.logits is pyro.get_param_store()._params["schedule$$$schedule.logits"]


def test_a_copy_of_an_objective_learns_by_itself():
    loss = TraceSIS_ELBO(schedule=LearnedSchedule(2))
    other = copy.deepcopy(loss)
    assert other.param_name != loss.param_name

    def model():
        with pyro.plate("data", 2):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 0.3), obs=torch.ones(2))

    def guide():
        with pyro.plate("data", 2):
            pyro.sample("z", dist.Normal(0.0, 1.0))

    SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), loss=loss).step()
    assert not torch.equal(loss.schedule.logits, torch.zeros(2))
    assert torch.equal(other.schedule.logits, torch.zeros(2))
    SVI(model, guide, pyro.optim.Adam({"lr": 0.2}), loss=other).step()
    assert not torch.equal(other.schedule.logits, loss.schedule.logits)
