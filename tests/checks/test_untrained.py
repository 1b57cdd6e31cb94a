"""Guides that never ran are refused; those that were trained or loaded, or cannot be, are not."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import (
    AutoDelta,
    AutoGuideList,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
    AutoNormalMessenger,
    AutoStructured,
)
from pyro.nn import PyroModule, PyroParam
from torch import nn

from pyro_mcvae import (
    TraceIWAE_ELBO,
    log_evidence,
    refine,
    report,
    sandwich,
)
from tests.params import in_turn

X = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64)
EXACT = dist.Normal(0.0, 2**0.5).log_prob(X).sum()


def model(x):
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
        pyro.sample("x", dist.Normal(z, 1.0), obs=x)


def plain(x):
    loc = pyro.param("loc", torch.zeros(3))
    with pyro.plate("data", len(x)):
        pyro.sample("z", dist.Normal(loc, 1.0))


def listed():
    guides = AutoGuideList(model)
    guides.append(AutoNormal(poutine.block(model, expose=["z"]), init_scale=1.0))
    return guides


def nested():
    auto = AutoNormal(model, init_scale=1.0)

    def guide(x):
        return auto(x)

    return guide


WIDE = {"init_scale": 1.0}

NEVER = {
    "normal": (lambda: AutoNormal(model, **WIDE), "AutoNormal never ran.*'AutoNormal.locs.z'"),
    "joint": (lambda: AutoMultivariateNormal(model, **WIDE), "'AutoMultivariateNormal.loc'"),
    "low rank": (lambda: AutoLowRankMultivariateNormal(model, **WIDE), "AutoLowRank"),
    "structured": (lambda: AutoStructured(model, **WIDE), "guide AutoStructured never ran"),
    "list": (listed, "the guide AutoGuideList never ran"),
    "messenger": (lambda: AutoNormalMessenger(model, **WIDE), "AutoNormalMessenger never"),
    "inside of a function": (nested, "the guide nested.<locals>.guide never ran"),
}

never = pytest.mark.parametrize("name", list(NEVER))

EVALUATORS = {
    "log_evidence": lambda m, g, x: log_evidence(m, g, x, num_particles=5),
    "chains": lambda m, g, x: log_evidence(m, g, x, schedule=2, warmup=0, num_particles=5),
    "refine": lambda m, g, x: refine(m, g, x, num_samples=2, num_particles=1),
    "report": report,
    "sandwich": lambda m, g, x: sandwich(m, g, x, schedule=2, warmup=0),
}


@never
def test_guides_that_never_ran_are_refused_every_time(name):
    make, message = NEVER[name]
    guide = make()
    for _ in range(2):  # the first time has not made a guide of it that ran
        with pytest.raises(ValueError, match=message):
            log_evidence(model, guide, X, num_particles=2)
    assert not dict(pyro.get_param_store().named_parameters())


@in_turn(name=EVALUATORS, local=[False, True])
def test_every_judge_refuses_them(name, local):
    with pyro.settings.context(module_local_params=local):
        guide = AutoMultivariateNormal(model)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"never ran: .* call guide\(\*args\) once"):
                EVALUATORS[name](model, guide, X)
    assert guide.prototype_trace is None
    assert not list(guide.parameters())
    assert guide.training


@never
def test_one_call_says_that_initial_values_are_meant(name):
    guide = NEVER[name][0]()
    with poutine.block():
        guide(X)
    result = log_evidence(model, guide, X, num_particles=4000)
    assert abs(result.log_evidence.sum() - EXACT) < 0.5


@never
def test_trained_guides_are_judged(name):
    guide = NEVER[name][0]()
    loss = Trace_ELBO(max_plate_nesting=1)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), loss=loss)
    svi.step(X)
    result = log_evidence(model, guide, X, num_particles=4000)
    assert abs(result.log_evidence.sum() - EXACT) < 0.5


@pytest.mark.parametrize("name", ["normal", "joint", "list"])
def test_parameters_that_wait_in_the_store_are_judged(name):
    first = NEVER[name][0]()
    TraceIWAE_ELBO().loss(model, first, X)
    saved = pyro.get_param_store().get_state()
    pyro.clear_param_store()
    with pytest.raises(ValueError, match="never ran"):
        log_evidence(model, NEVER[name][0](), X)
    pyro.get_param_store().set_state(saved)
    result = log_evidence(model, NEVER[name][0](), X, num_particles=100)
    assert result.log_evidence.isfinite().all()


def test_modules_need_no_store():
    """Loaded from a state_dict, or trained by a torch optimizer: the store never heard of them."""
    net = nn.Linear(1, 1)

    def guide(x):
        pyro.module("net", net)
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(net(x[:, None]).squeeze(-1), 1.0))

    class Encoder(PyroModule):
        def __init__(self):
            super().__init__()
            self.net = PyroModule[nn.Linear](1, 1)
            self.scale = PyroParam(torch.ones(()), dist.constraints.positive)

        def forward(self, x):
            with pyro.plate("data", len(x)):
                pyro.sample("z", dist.Normal(self.net(x[:, None]).squeeze(-1), self.scale))

    trained = AutoNormal(model)
    trained(X)
    pyro.clear_param_store()  # or it holds the parameters of the first
    loaded = AutoNormal(model)
    loaded(X)
    loaded.load_state_dict(trained.state_dict())
    for program in (guide, Encoder(), loaded):
        pyro.clear_param_store()
        for _ in range(2):
            assert log_evidence(model, program, X, num_particles=5).log_evidence.isfinite().all()
        assert not dict(pyro.get_param_store().named_parameters())


@pytest.mark.slow
def test_guides_without_parameters_never_need_to_run():
    def prior(x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(0.0, 1.0))

    def known(x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(x / 2, 0.5**0.5))

    def within(x):
        with called.plates["data"]:
            pyro.sample("z", dist.Normal(x / 2, 1.0))

    called = AutoGuideList(model)
    called.append(within)
    for i, evaluator in enumerate(EVALUATORS.values()):
        evaluator(model, (prior, known, called)[i % 3], X)
    assert torch.allclose(log_evidence(model, known, X).log_evidence.sum(), EXACT)


def test_initial_values_of_a_function_are_said_once(caplog):
    """``pyro.param(name, init)`` may hold what is meant, as the tests of this package do."""

    def times() -> int:
        return sum("never ran" in record.getMessage() for record in caplog.records)

    for count in (1, 2):
        log_evidence(model, plain, X, num_particles=5)
        assert times() == count
    assert (
        "guide plain never ran, so the initial values of its parameters ('loc') are evaluated"
        in (caplog.text)
    )
    plain(X)
    log_evidence(model, plain, X, num_particles=5)
    assert times() == 2


def test_models_begin_where_they_like():
    """A model's initial parameters are a model as good as any other."""

    def begins(x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(pyro.param("mean", torch.zeros(())), 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def guide(x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(x / 2, 0.5**0.5))

    assert torch.allclose(log_evidence(begins, guide, X).log_evidence.sum(), EXACT)


def test_a_guide_that_another_one_holds_may_wait():
    """Only what ran counts: guides that lie beside the evaluated one need not."""

    class Pair:
        def __init__(self):
            self.mine, self.other = AutoNormal(model), AutoDelta(model)

        def guide(self, x):
            return self.mine(x)

    pair = Pair()
    pair.guide(X)
    assert log_evidence(model, pair.guide, X).log_evidence.isfinite().all()
    assert pair.other.prototype_trace is None


def test_errors_of_the_first_run_leave_the_guide_as_it_was():
    def broken(x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)
            pyro.sample("y", dist.Normal(z, 1.0))

    guide = AutoNormal(model)
    with pytest.raises(ValueError, match="site 'y' of the model"):
        log_evidence(broken, guide, X)
    assert guide.prototype_trace is None
