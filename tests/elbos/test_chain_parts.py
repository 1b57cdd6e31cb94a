"""Custom kernels, schedules and step sizes in training."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_mcvae import (
    HMC,
    MALA,
    ULA,
    Kernel,
    LearnedMomentum,
    LearnedSchedule,
    LearnedStepSize,
    Proposal,
    Schedule,
    StepSize,
    TraceAIS_ELBO,
    TraceSIS_ELBO,
    UnderdampedLangevin,
)
from tests.estimates import assert_mean

X = torch.tensor([-1.0, 0.0, 2.0])


def programs(site="z"):
    def model(x):
        with pyro.plate("data", 3):
            z = pyro.sample(site, dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def guide(x):
        loc = pyro.param("loc", torch.tensor(0.0))
        with pyro.plate("data", 3):
            pyro.sample(site, dist.Normal(loc, 1.0))

    return model, guide, X.to(torch.get_default_dtype())


class Scaled(Schedule):
    def __init__(self, num_steps):
        super().__init__(num_steps)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self):
        return torch.linspace(0, 1, self.num_steps + 1) * self.scale


@pytest.mark.parametrize("scale", [0.1, 1.3])
@pytest.mark.parametrize(
    ("cls", "kernel"), [(TraceAIS_ELBO, lambda: MALA(0.2)), (TraceSIS_ELBO, lambda: ULA(0.1))]
)
def test_a_schedule_that_leaves_one_estimates_the_evidence(cls, kernel, scale):
    """E exp W = p(x), for any values between the ends: 4.5 standard errors."""
    elbo = cls(kernel=kernel(), schedule=Scaled(4), num_particles=4000)
    elbo.schedule.scale.data.fill_(scale)
    model, guide, x = programs()
    elbo.loss(model, guide, x)
    exact = dist.Normal(0.0, 2**0.5).log_prob(x)
    assert_mean((elbo.last_step.log_weight - exact).exp(), torch.ones(3))


LEARNED = {
    "step size of AIS": (
        lambda: TraceAIS_ELBO(3, HMC(LearnedStepSize(0.1))),
        "kernel.step_size.log_value",
    ),
    "schedule of AIS": (lambda: TraceAIS_ELBO(schedule=LearnedSchedule(3)), "schedule.logits"),
    "SIS": (lambda: TraceSIS_ELBO(3), "kernel.momentum.logit"),
    "momentum": (
        lambda: TraceSIS_ELBO(3, UnderdampedLangevin(0.1, momentum=LearnedMomentum(0.5))),
        "kernel.momentum.logit",
    ),
}


@pytest.mark.parametrize("name", LEARNED)
def test_parameters_that_are_not_finite_are_named(name):
    """Also where every move would be rejected, as if nothing were wrong."""
    make, parameter = LEARNED[name]
    elbo, args = make(), programs()
    elbo.loss_and_grads(*args)
    elbo.get_parameter(parameter).data.fill_(float("nan"))
    with pytest.raises(ValueError, match=rf"the parameter '{parameter}' of .* is not finite"):
        elbo.loss_and_grads(*args)


def test_a_schedule_that_is_not_finite_is_named():
    class Once(Schedule):
        value = 0.5

        def forward(self):
            return torch.tensor([0.0, self.value, 1.0])

    elbo, args = TraceAIS_ELBO(2, MALA(0.1), schedule=Once(2)), programs()
    elbo.loss(*args)
    elbo.schedule.value = float("nan")
    with pytest.raises(ValueError, match=r"the schedule is not finite \(\[0.0, nan, 1.0\]\)"):
        elbo.loss(*args)


class Own(Kernel):
    adjusted = True

    def __init__(self, propose):
        super().__init__(0.1)
        self.own = propose

    def propose(self, state, target):
        return self.own(state)


PROPOSALS = {
    "tuple": (lambda s: (s, 0.0), r"a Proposal\(state, log_ratio\) .* got a tuple"),
    "nothing": (lambda s: None, "got a NoneType"),
    "tensor": (
        lambda s: Proposal(s.position, torch.zeros(2, 3)),
        "got a Tensor",
    ),
    "coordinates": (
        lambda s: Proposal(s, torch.zeros(2, 3, 1)),
        r"a log ratio per chain, of shape \(2, 3\) .*, got \(2, 3, 1\) and \(2, 3, 1\)",
    ),
    "shape": (
        lambda s: Proposal(s._replace(position=s.position[..., [0, 0]]), torch.zeros(2, 3)),
        r"positions of shape \(2, 3, 1\) .*, got \(2, 3, 2\) and \(2, 3\)",
    ),
}


@pytest.mark.parametrize("name", PROPOSALS)
def test_what_a_kernel_proposes_is_named(name):
    propose, message = PROPOSALS[name]
    with pytest.raises(ValueError, match=f"Own.propose must .*{message}"):
        TraceAIS_ELBO(3, Own(propose)).loss(*programs())


def test_a_ratio_may_be_a_number():
    TraceAIS_ELBO(3, Own(lambda s: Proposal(s, 0.0))).loss(*programs())


class Float(StepSize):
    value = 0.1

    def forward(self, transition=-1):
        return self.value


def test_what_step_sizes_return_is_named():
    with pytest.raises(ValueError, match=r"Float.forward must return a tensor .*, got 0.1"):
        TraceSIS_ELBO(3, ULA(Float())).loss(*programs())
    many = Float()
    many.value = torch.ones(2, 3)
    with pytest.raises(
        ValueError, match=r"Float.forward must return a tensor .*, got shape \(2, 3\)"
    ):
        TraceSIS_ELBO(3, ULA(many)).loss(*programs())


def test_a_kernel_that_does_not_initialize_its_base_is_named():
    class Lazy(Own):
        def __init__(self):
            nn.Module.__init__(self)

    with pytest.raises(ValueError, match="Lazy has no step size: its __init__ must call"):
        TraceAIS_ELBO(3, Lazy())
