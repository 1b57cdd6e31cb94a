"""Programs that do not broadcast over slots: under vmap, or each slot by itself, the same sums."""

import logging
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch import nn

from pyro_mcvae import CompiledELBO, LeaveOneOut, TraceRaoBlackwell_ELBO
from pyro_mcvae.programs.types import LeadingDimsError
from tests.cases import every
from tests.elbos.discrete_programs import Discrete, param, randn
from tests.elbos.exhaustive import exhaustive

ALL = math.inf


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.ConvTranspose2d(3, 1, 2)

    def forward(self, h):
        return self.layer(h.reshape(-1, 3, 1, 1)).tanh().flatten(1)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(3, 4, batch_first=True)

    def forward(self, h):
        return self.layer(h.unsqueeze(1).expand(-1, 2, -1))[0].sum(1)


class Softmax(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, h):
        return self.layer(h).softmax(1)


class Design(nn.Module):
    """A matrix for each datum times its vector, one datum after the other."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 4, 3))

    def forward(self, h):
        return torch.stack([self.weight[i] @ h[i] for i in range(2)])


def network(cls):
    """A network whose parameters are the same each time."""
    result = cls().double()
    for i, p in enumerate(result.parameters()):
        p.data.copy_(randn(*p.shape, seed=i))
    return result


def pictures(cls, two=False):
    """Labels behind which a network draws, and with ``two`` a switch that depends on the label."""

    net, data = network(cls), 1.5 * randn(2, 4, seed=7).double()

    def model():
        pyro.module("net", net)
        with pyro.plate("data", 2):
            y = pyro.sample("y", dist.Categorical(logits=param("prior", 3)))
            h = nn.functional.one_hot(y, 3).to(data)
            if two:
                b = pyro.sample("b", dist.Bernoulli(logits=param("pb", 3)[y]))
                h = h * (1 + b.unsqueeze(-1))
            pyro.sample("x", dist.Normal(net(h), 0.8).to_event(1), obs=data)

    def guide():
        with pyro.plate("data", 2):
            y = pyro.sample("y", dist.Categorical(logits=param("q", 2, 3)))
            if two:
                pyro.sample("b", dist.Bernoulli(logits=param("qb", 3)[y]))

    return Discrete(model, guide)


def branches(is_model):
    """Python looks at the value of a site in each element of a sequential plate."""
    for i in pyro.plate("data", 2):
        logits = param("prior", 2) if is_model else param("q", 2, 2)[i]
        y = pyro.sample(f"y{i}", dist.Categorical(logits=logits))
        if is_model:
            loc = param("mu") if y == 1 else -0.5 * param("mu")
            pyro.sample(f"x{i}", dist.Normal(loc, 1.0), obs=torch.tensor(i - 0.3))


PROGRAMS = {
    "convolution": pictures(Convolution),
    "softmax": pictures(Softmax, two=True),
    "design": pictures(Design),
    "gru": pictures(Recurrent),
    "branches": Discrete(lambda: branches(True), lambda: branches(False)),
}
LOOPED = "gru", "branches"
programs = pytest.mark.parametrize("name", PROGRAMS)


def exact(program):
    TraceRaoBlackwell_ELBO(0).loss(program.model, program.guide)  # which makes the parameters
    return exhaustive(program.model, program.guide)


@pytest.mark.parametrize(
    ("name", "num_particles"), [(n, 1 + i % 2) for i, n in enumerate(PROGRAMS)]
)
def test_the_sum_over_all_values_is_exact(name, num_particles):
    program = PROGRAMS[name]
    loss, grads = exact(program)
    elbo = TraceRaoBlackwell_ELBO(ALL, num_particles=num_particles)
    for _ in range(2):
        assert elbo.loss_and_grads(program.model, program.guide) == pytest.approx(loss)
        result = program.take_gradients()
        for key, value in grads.items():
            torch.testing.assert_close(result[key], value)
    assert -elbo.bounds(program.model, program.guide).total.item() == pytest.approx(loss)


@pytest.mark.parametrize("name", every(2, PROGRAMS))
def test_sampled_slots_have_the_mean_of_the_sum(name):
    program = PROGRAMS[name]
    loss, grads = exact(program)
    options = {"baseline": LeaveOneOut(), "num_samples": 2} if name == "softmax" else {}
    count, steps = (1, 60) if name in LOOPED else (40, 10)
    elbo = TraceRaoBlackwell_ELBO(0 if name == "design" else 1, num_particles=count, **options)
    runs = []
    for i in range(steps):
        with pyro.validation_enabled(i == 0):
            result = [elbo.loss_and_grads(program.model, program.guide)]
        taken = program.take_gradients()
        runs.append(torch.cat([torch.tensor(result), *(taken[k].flatten() for k in grads)]))
    truth = torch.cat([torch.tensor([loss]), *(g.flatten() for g in grads.values())])
    error = torch.stack(runs).std(0) / steps**0.5
    assert ((torch.stack(runs).mean(0) - truth).abs() < 6 * error + 1e-9).all()


@programs
def test_loops_are_refused_where_particles_have_to_be_vectorised(name):
    program = PROGRAMS[name]
    elbo = TraceRaoBlackwell_ELBO(ALL, vectorize_particles=True)
    if name in LOOPED:
        with pytest.raises(LeadingDimsError, match="slots"):
            elbo.loss(program.model, program.guide)
    else:
        assert elbo.loss(program.model, program.guide) == pytest.approx(exact(program)[0])


@pytest.mark.parametrize("name", ["convolution", "gru"])
def test_a_recorded_step_is_the_plain_one(name):
    program = PROGRAMS[name]
    loss, grads = exact(program)
    compiled = CompiledELBO(TraceRaoBlackwell_ELBO(ALL), backend="eager")
    for _ in range(3):
        assert compiled.loss_and_grads(program.model, program.guide) == pytest.approx(loss)
        result = program.take_gradients()
        for key, value in grads.items():
            torch.testing.assert_close(result[key], value)


def test_a_loop_is_told_once(caplog):
    program = PROGRAMS["gru"]
    elbo = TraceRaoBlackwell_ELBO(1)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            elbo.loss(program.model, program.guide)
    logged = [r.getMessage() for r in caplog.records if "summed jointly" in r.getMessage()]
    assert len(logged) == 1, logged


@pytest.mark.parametrize(("name", "count"), [("gru", 1), ("gru", ALL), ("softmax", 1)])
def test_an_entropy_at_slots_in_rows_is_told_once_for_each_site(name, count, caplog):
    program = PROGRAMS[name]
    elbo = TraceRaoBlackwell_ELBO(count, entropy="exact")
    for _ in range(2):
        elbo.loss(program.model, program.guide)
    logged = [r.getMessage() for r in caplog.records if "entropy" in r.getMessage()]
    # The sum over all values has it exactly.
    assert len(logged) == (name == "gru" and count == 1), logged
    assert all("'y'" in t and "rows" in t for t in logged)


@pytest.mark.parametrize("kind", ["poisson", "masked", "plain"])
def test_an_entropy_without_closed_form_is_told_once(kind, caplog):
    def program(guide):
        with pyro.plate("data", 2):
            rate = param("rate", 2).exp() if guide else torch.ones(2).double()
            fn = dist.Poisson(rate) if kind == "poisson" else dist.Bernoulli(rate / (1 + rate))
            z = pyro.sample("z", fn.mask(True) if kind == "masked" else fn)
            if not guide:
                pyro.sample("x", dist.Normal(z, 1.0), obs=torch.zeros(2).double())

    elbo = TraceRaoBlackwell_ELBO(1, entropy="exact")
    for _ in range(2):
        elbo.loss_and_grads(lambda: program(False), lambda: program(True))
    logged = [r.getMessage() for r in caplog.records if "entropy" in r.getMessage()]
    assert len(logged) == (kind != "plain"), logged
    assert all("'z'" in t and "closed form" in t for t in logged)


def test_training_by_svi():
    program = PROGRAMS["softmax"]
    svi = SVI(
        program.model, program.guide, pyro.optim.Adam({"lr": 0.1}), loss=TraceRaoBlackwell_ELBO(1)
    )
    losses = [svi.step() for _ in range(25)]
    assert sum(losses[-5:]) < sum(losses[:5])
