"""Every run with leading dims is looked at by the same guards, and none of them goes quiet."""

import logging
import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_mcvae import TraceIWAE_ELBO, TraceSGVB_ELBO, TraceSIS_ELBO, log_evidence
from pyro_mcvae.checks import vectorization
from pyro_mcvae.coordinates.log_weight import LogWeight
from pyro_mcvae.particles.sampler import ParticleSampler
from pyro_mcvae.programs.run import Programs
from pyro_mcvae.structure import marked

alone = pytest.mark.usefixtures("leading_dims_only")
GROUP = torch.tensor([0, 0, 1, 1])


def grouped(index):
    """Four groups and four data; ``means[group]`` takes particles for groups."""

    def model():
        with pyro.plate("groups", 4):
            means = pyro.sample("means", dist.Normal(torch.tensor([-1.0, 2.0, 1.0, 0.0]), 1.0))
        with pyro.plate("data", 4):
            pyro.sample("x", dist.Normal(index(means), 1.0), obs=torch.tensor([-2.0, -2, 2, 2]))

    def guide():
        with pyro.plate("groups", 4):
            pyro.sample("means", dist.Normal(torch.tensor([-2.0, 2.0, 1.0, 0.0]), 0.3))

    return model, guide


def wrong(means):
    return means[GROUP]


def right(means):
    return means[..., GROUP]


@alone
def test_a_judge_does_not_take_particles_for_groups_of_which_there_are_as_many():
    # Of four draws it took the first two for the groups' means.
    with pytest.raises(RuntimeError, match=r"\d vectorized particles.*index from the right"):
        log_evidence(*grouped(wrong), num_particles=4, vectorize_particles=True)
    result = log_evidence(*grouped(right), num_particles=4)
    assert bool(torch.as_tensor(result.log_evidence).isfinite().all())


@alone
def test_other_leading_dims_of_a_log_weight_are_not_taken_for_groups():
    def log_weight(index):
        programs = Programs(*grouped(index), (), {})
        sampler = ParticleSampler(1, True, max_plate_nesting=1)  # one particle shows nothing
        return LogWeight(sampler, programs)

    with pytest.raises(RuntimeError, match=r"\d vectorized particles.*index from the right"):
        log_weight(wrong)(torch.zeros(4, *log_weight(wrong).coordinates.shape[1:]))
    at = log_weight(right)
    assert at(torch.zeros(4, *at.coordinates.shape[1:])).log_weight.isfinite().all()


@alone
@pytest.mark.parametrize("objective", [TraceSGVB_ELBO, TraceIWAE_ELBO])
def test_nor_are_those_of_a_loss(objective):
    """With four of each, ``means[group]`` had a loss of 21.9 where 11.4 was right."""
    elbo = objective(4, vectorize_particles=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"\d vectorized.*index from the right"):
            elbo.loss(*grouped(wrong))
    assert math.isfinite(elbo.loss(*grouped(right)))


def sized(layer):
    """A model of as many data as it is given, and a guide."""

    def model(n):
        with pyro.plate("data", n):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(layer(z), 1.0), obs=torch.ones(n))

    def guide(n):
        with pyro.plate("data", n):
            pyro.sample("z", dist.Normal(0.5, 1.0))

    return model, guide


@alone
def test_every_size_of_a_model_is_compared():
    elbo = TraceIWAE_ELBO(2, vectorize_particles=True, max_plate_nesting=1)
    model, guide = sized(lambda z: z.softmax(0) if z.shape[-1] >= 20 else z)
    for n in range(5, 20):
        elbo.loss(model, guide, n)
    for n in (20, 25):
        with pytest.raises(RuntimeError, match="count dims from the right"):
            elbo.loss(model, guide, n)


class GuardFaultError(Exception):
    pass


def failing(*args, **kwargs):
    raise GuardFaultError


def test_a_fault_of_the_comparison_is_no_reason_to_pass(monkeypatch):
    monkeypatch.setattr(vectorization, "differ", failing)
    with pytest.raises(GuardFaultError):
        TraceIWAE_ELBO(2, vectorize_particles=True).loss(*sized(lambda z: z), 5)


def test_a_fault_of_the_search_for_dependent_elements_is_no_reason_to_pass(monkeypatch):
    monkeypatch.setattr(marked.MarkedRun, "coupled", property(failing))
    with pytest.raises(GuardFaultError):
        TraceIWAE_ELBO(2).loss(*sized(lambda z: z), 5)


@pytest.mark.parametrize("vectorize", [False, None, True])
def test_programs_that_fail_at_other_latents_get_the_safe_answer(vectorize, caplog):
    def shy(z):
        if not torch.distributions.Distribution._validate_args and z.dim() == 1:
            raise ZeroDivisionError("beside a step")
        return z

    elbo = TraceIWAE_ELBO(2, vectorize_particles=vectorize, max_plate_nesting=1)
    with caplog.at_level(logging.WARNING):
        assert math.isfinite(elbo.loss(*sized(shy), 5))
    if vectorize:
        # The user says that the programs broadcast, and they can be tested in their own layout.
        assert "cannot be compared with runs of one: ZeroDivisionError" in caplog.text
        assert elbo.bounds(*sized(shy), 5).plates == ("data",)
    else:
        assert "are independent: they share one weight" in caplog.text
        assert elbo.bounds(*sized(shy), 5).plates == ()


def points(guide_size, in_plate):
    """Three coordinates of one latent, of which the guide draws some, maybe in a plate."""

    def model():
        z = pyro.sample("z", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        pyro.sample("x", dist.Normal(z.sum(-1), 1.0), obs=torch.tensor(1.0))

    def guide():
        z = dist.Normal(torch.zeros(guide_size), 1.0).to_event(1)
        if in_plate:
            with pyro.plate("more", 1):
                pass
        pyro.sample("z", z)

    return model, guide


# All have the same sites, plates and shapes of densities.
@pytest.mark.parametrize(
    ("make", "guide_size", "in_plate"), [(TraceSGVB_ELBO, 1, False), (TraceSIS_ELBO, 3, True)]
)
def test_programs_without_leading_dims_are_looked_at_for_each_pair(make, guide_size, in_plate):
    elbo = make()
    elbo.loss(*points(3, False))
    result = pytest.raises(ValueError, match="shapes disagree at site 'z'")
    if in_plate:
        result = pytest.warns(UserWarning, match="plate statements in guide but not model")
    with result:
        elbo.loss(*points(guide_size, in_plate))


def test_programs_without_leading_dims_are_looked_at_when_they_change():
    model, _ = points(3, False)
    size = [3]
    elbo = TraceSGVB_ELBO()

    def guide():
        pyro.sample("z", dist.Normal(torch.zeros(size[0]), 1.0).to_event(1))

    elbo.loss(model, guide)
    size[0] = 1
    with pytest.raises(ValueError, match="shapes disagree at site 'z'"):
        elbo.loss(model, guide)
