"""Learned parts of an objective and Pyro's parameter store."""

import copy
import pickle

import pyro
import pyro.distributions as dist
import pyro.optim
import pytest
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoNormal

from pyro_mcvae import (
    AdaptiveStepSize,
    LearnedMomentum,
    LearnedSchedule,
    LearnedStepSize,
    TraceSIS_ELBO,
    UnderdampedLangevin,
)


@pytest.mark.filterwarnings("ignore:You are using `torch.load`:FutureWarning")  # Pyro 1.9.1 does
def test_learned_parts_that_were_loaded_into_the_store_go_on_learning(tmp_path):
    """Pyro's own way of saving: the store, and the optimizer."""

    def begin():
        loss = TraceSIS_ELBO(schedule=LearnedSchedule(3))

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
    assert loss.schedule.logits is pyro.get_param_store()._params["TraceSIS_ELBO$$$schedule.logits"]


def model():
    with pyro.plate("data", 2):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z, 0.3), obs=torch.ones(2))


def guide():
    with pyro.plate("data", 2):
        pyro.sample("z", dist.Normal(0.0, 1.0))


def test_a_copy_of_an_objective_learns_by_itself():
    loss = TraceSIS_ELBO(schedule=LearnedSchedule(2))
    other = copy.deepcopy(loss)

    SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), loss=loss).step()
    assert not torch.equal(loss.schedule.logits, torch.zeros(2))
    assert torch.equal(other.schedule.logits, torch.zeros(2))
    SVI(model, guide, pyro.optim.Adam({"lr": 0.2}), loss=other).step()
    assert not torch.equal(other.schedule.logits, loss.schedule.logits)


def test_a_trained_objective_is_pickled():
    """The store hangs weak references on its parameters: torch.save failed after the first step."""
    loss = TraceSIS_ELBO(2)

    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), loss=loss)
    for _ in range(3):
        svi.step()
    other = pickle.loads(pickle.dumps(loss))
    pyro.set_rng_seed(0)
    value = loss.loss(model, guide)
    pyro.set_rng_seed(0)
    assert other.loss(model, guide) == value
    before = loss.schedule.logits.clone()
    svi.step()
    assert not torch.equal(loss.schedule.logits, before)
    assert torch.equal(other.schedule.logits, before)


def trained(initial=None, warmup=20, num_steps=3, **options):
    step_size = LearnedStepSize(AdaptiveStepSize(initial), num_steps, warmup=warmup)
    return TraceSIS_ELBO(
        kernel=UnderdampedLangevin(step_size, momentum=LearnedMomentum(0.9, num_steps)),
        schedule=LearnedSchedule(num_steps),
        **options,
    )


def test_names_in_the_store_depend_on_the_order_of_use_alone():
    """In a new process, after ``clear_param_store``, the same program has the same names."""

    def step(loss):
        SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), loss=loss).step()
        return loss

    unused, first, second = (TraceSIS_ELBO(2) for _ in range(3))
    step(first)
    step(second)
    names = [first.param_name, second.param_name]
    assert names == ["TraceSIS_ELBO", "TraceSIS_ELBO_2"]
    values = first.schedule.logits.clone(), second.schedule.logits.clone()
    pyro.clear_param_store()
    assert step(unused).param_name == "TraceSIS_ELBO"
    # The first one's name is taken; its values are still its own.
    assert step(first).param_name == "TraceSIS_ELBO_2"
    assert step(second).param_name == "TraceSIS_ELBO_3"
    for loss, before in zip([first, second], values, strict=True):
        assert torch.allclose(loss.schedule.logits, before, atol=0.2)
        assert not torch.equal(loss.schedule.logits, unused.schedule.logits)


def test_several_objectives_take_over_their_values_from_a_loaded_store(tmp_path):
    def train(steps):
        pyro.clear_param_store()
        losses = [TraceSIS_ELBO(2), TraceSIS_ELBO(2)]
        if not steps:
            pyro.get_param_store().load(tmp_path / "store")
        for loss, lr in zip(losses, [0.1, 0.2], strict=True):
            svi = SVI(model, guide, pyro.optim.Adam({"lr": lr if steps else 1e-9}), loss=loss)
            for _ in range(steps or 1):
                svi.step()
        return [loss.schedule.logits.detach().clone() for loss in losses]

    saved = train(3)
    assert not torch.equal(*saved)
    pyro.get_param_store().save(tmp_path / "store")
    for value, before in zip(train(0), saved, strict=True):
        torch.testing.assert_close(value, before)


class Steep:
    """A likelihood that is narrower than the guide's first scale, and many of its widths away."""

    def __init__(self, scale):
        self.scale, self.x = scale, torch.tensor([5.0, -5.0, 0.0])

    def model(self):
        z = pyro.sample("z", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        pyro.sample("x", dist.Normal(5 * z, self.scale).to_event(1), obs=self.x)

    def train(self, loss, steps):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        guide = AutoNormal(self.model, init_scale=0.1)
        optim = pyro.optim.ClippedAdam({"lr": 0.02})
        svi = SVI(self.model, guide, optim, loss=loss)
        with pyro.validation_enabled(False):  # it costs most of the time
            losses = torch.tensor([svi.step() for _ in range(steps)])
        return svi, losses


@pytest.mark.parametrize("interface", ["svi", "module"])
def test_every_parameter_of_every_transition_trains(interface):
    problem, loss = Steep(1.0), trained(warmup=1)
    before = {name: p.detach().clone() for name, p in loss.named_parameters()}
    if interface == "svi":
        problem.train(loss, 4)
    else:
        module = loss(problem.model, AutoNormal(problem.model))
        module()
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        for _ in range(4):
            optimizer.zero_grad()
            module().backward()
            optimizer.step()
    moved = {name: p != before[name] for name, p in loss.named_parameters()}
    # A chain's first momentum is drawn again.
    assert not moved["kernel.momentum.logit"][0]
    assert moved["kernel.momentum.logit"][1:].all()
    assert moved["kernel.step_size.log_value"].all()
    assert moved["schedule.logits"].all()
