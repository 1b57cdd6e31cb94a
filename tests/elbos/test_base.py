"""Both of Pyro's interfaces, for every objective: SVI and ELBOModule; bad input."""

import math
import traceback

import pyro
import pyro.distributions as dist
import pyro.optim
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroParam, PyroSample
from torch import nn

from pyro_mcvae import (
    HMC,
    ULA,
    CompiledELBO,
    IndependentDraw,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
    UnderdampedLangevin,
)
from tests.cases import every
from tests.estimates import take_gradients
from tests.models import (
    BetaBernoulli,
    ConjugateGaussian,
    DiscreteMixture,
    HierarchicalGaussian,
    LinearGaussianChain,
    NestedGaussian,
)

OBJECTIVES = {
    "sgvb-3": lambda **k: TraceSGVB_ELBO(num_particles=3, **k),
    "iwae-3": lambda **k: TraceIWAE_ELBO(num_particles=3, **k),
    "iwae-3-vimco": lambda **k: TraceIWAE_ELBO(3, gradient_estimator="vimco", **k),
    "rb-plus-3": lambda **k: TraceRaoBlackwell_ELBO(
        0, 2, baseline=IndependentDraw(), num_particles=3, **k
    ),
    "sis": lambda **k: TraceSIS_ELBO(2, ULA(0.05), **k),
    "sis-latent-multi": lambda **k: TraceSIS_ELBO(
        2,
        UnderdampedLangevin(0.2),
        num_particles=3,
        multi_sample=True,
        coordinates="latent",
        **k,
    ),
    "sis-reweighted": lambda **k: TraceSIS_ELBO(
        2, ULA(0.05), num_particles=2, gradient_estimator="reweighted", **k
    ),
    "ais-multi": lambda **k: TraceAIS_ELBO(
        2, HMC(0.2, num_leapfrog=2), num_particles=3, multi_sample=True, **k
    ),
}
MODELS = {
    "gaussian": lambda: ConjugateGaussian(N=5, subsample_size=3),
    "mixture": lambda: DiscreteMixture(N=4),
    "beta-bernoulli": lambda: BetaBernoulli(N=4, subsample_size=2),
    "hierarchical": lambda: HierarchicalGaussian(N=4),
    "nested": lambda: NestedGaussian(G=3, M=2),
    "chain": lambda: LinearGaussianChain(N=3, T=3),
}
# One of each way to the weights: draws alone, particles, slots in dims, chains.
FAMILIES = ("sgvb-3", "iwae-3", "rb-plus-3", "sis")
families = pytest.mark.parametrize("objective", FAMILIES)
# Each objective looped or vectorized.
in_turn = pytest.mark.parametrize(
    ("objective", "vectorize"), [(o, bool(i % 2)) for i, o in enumerate(OBJECTIVES)]
)
families_in_turn = pytest.mark.parametrize(
    ("objective", "vectorize"), [(o, bool(i % 2)) for i, o in enumerate(FAMILIES)]
)


@pytest.mark.parametrize(
    ("objective", "vectorize"),
    [
        pytest.param(o, v, marks=() if v == i % 2 and i % 4 in (0, 3) else pytest.mark.slow)
        for i, o in enumerate(OBJECTIVES)
        for v in (False, True)
    ],
)
def test_the_losses_and_bounds_agree_under_one_seed(objective, vectorize):
    """At the first call, before anything is known of the programs, and at the next one."""
    case = list(OBJECTIVES).index(objective)
    exact = list(MODELS.values())[(case + 3 * vectorize) % len(MODELS)]()
    model, guide = exact.model, exact.guide
    grads, values = [], []

    def loss(elbo):
        return elbo.loss(model, guide)

    def differentiable(elbo):
        result = elbo.differentiable_loss(model, guide)
        assert result.shape == ()
        result.backward()
        grads.append(take_gradients(exact))
        return result.item()

    def step(elbo):
        result = elbo.loss_and_grads(model, guide)
        grads.append(take_gradients(exact))
        return result

    def bounds(elbo):
        return -elbo.bounds(model, guide).total.item()

    calls = [loss, differentiable, bounds, step]
    for first in (case % 2, case % 2 + 2):
        elbo = OBJECTIVES[objective](vectorize_particles=vectorize)
        for call in (calls[first], calls[(first + 1) % 4]):
            pyro.set_rng_seed(1)
            values.append(call(elbo))
    assert values == pytest.approx([values[0]] * 4, rel=1e-9)
    assert any(grad.abs().max() > 0 for grad in grads[0].values())
    for key in grads[0]:
        assert torch.allclose(grads[0][key], grads[1][key])


@pytest.mark.parametrize("objective", every(4, OBJECTIVES))
def test_an_svi_step_goes_down_the_gradient_and_an_evaluation_changes_nothing(objective):
    exact = ConjugateGaussian(N=10, subsample_size=5)
    rate = 0.01
    elbo, other = OBJECTIVES[objective](), OBJECTIVES[objective]()
    svi = SVI(exact.model, exact.guide, pyro.optim.SGD({"lr": rate}), loss=elbo)
    for seed in (1, 2):  # a gradient that was left over would count twice
        before = exact.params()
        pyro.set_rng_seed(seed)
        loss = other.loss_and_grads(exact.model, exact.guide)
        grads = take_gradients(exact)
        pyro.set_rng_seed(seed)
        assert math.isclose(svi.step(), loss, rel_tol=1e-9)
        for name, value in exact.params().items():
            torch.testing.assert_close(value, before[name] + rate * grads[name])
            assert (grads[name] != 0).any()
    before = exact.params()
    pyro.set_rng_seed(0)
    loss = svi.evaluate_loss()
    pyro.set_rng_seed(0)
    assert math.isclose(elbo.loss(exact.model, exact.guide), loss, rel_tol=1e-9)
    assert all((exact.params()[k] == v).all() for k, v in before.items())


class Decoder(PyroModule):
    def __init__(self):
        super().__init__()
        self.w = PyroParam(torch.tensor(0.3))

    @PyroSample
    def bias(self):
        return dist.Normal(0.0, 1.0)

    def forward(self, x):
        bias = self.bias
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(self.w * z + bias, 0.5), obs=x)


@pytest.mark.parametrize("objective", every(4, OBJECTIVES, 3))
def test_a_module_has_the_gradient_of_a_step(objective):
    x = 2.0 + torch.randn(20)
    model = Decoder()
    guide = AutoNormal(model)
    elbo, plain = OBJECTIVES[objective](), OBJECTIVES[objective]()
    module = elbo(model, guide)
    pyro.set_rng_seed(0)
    module(x)  # finds the parameters
    pyro.get_param_store().clear()
    result = []
    for step in (lambda: module(x).backward(), lambda: plain.loss_and_grads(model, guide, x)):
        pyro.set_rng_seed(1)
        step()
        result.append({n: p.grad for n, p in module.named_parameters() if "kernel" not in n})
        module.zero_grad()
    by_module, by_step = result
    assert {n.split(".")[0] for n in by_module} == {"model", "guide"}
    for name, grad in by_module.items():
        assert grad.abs().max() > 0, name
        torch.testing.assert_close(grad, by_step[name])


def test_retain_graph_lets_a_shared_graph_be_used_again():
    x = torch.zeros(3)
    weight = torch.nn.Parameter(torch.tensor(0.4))
    shared = weight**2  # one graph behind two losses

    def model():
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def guide():
        with pyro.plate("data", 3):
            pyro.sample("z", dist.Normal(shared, 1.0))

    kept = TraceIWAE_ELBO(2, retain_graph=True)
    kept.loss_and_grads(model, guide)
    TraceIWAE_ELBO(2).loss_and_grads(model, guide)
    with pytest.raises(RuntimeError, match="second time"):
        TraceIWAE_ELBO(2).loss_and_grads(model, guide)


@in_turn
def test_single_precision_stays_single(objective, vectorize):
    exact = ConjugateGaussian(N=5, dtype=torch.float32)
    elbo = OBJECTIVES[objective](vectorize_particles=vectorize)
    loss = elbo.differentiable_loss(exact.model, exact.guide)
    loss.backward()
    assert loss.dtype == torch.float32
    assert elbo.bounds(exact.model, exact.guide).per_datum.dtype == torch.float32


@families
def test_without_validation_the_loss_is_not_read(objective):
    def guide():
        with pyro.plate("data", 3):
            pyro.sample("z", dist.Normal(0.0, 1.0))

    def model():
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            x = torch.tensor([0.0, math.nan, 0.0])
            pyro.sample("x", dist.Normal(z, 1.0, validate_args=False), obs=x)

    elbo = OBJECTIVES[objective]()
    with pyro.validation_enabled(False):
        assert elbo.differentiable_loss(model, guide).isnan()
    with pytest.raises(ValueError, match=r"site .x. of the model .*\d NaN and 0 infinite of \d"):
        elbo.differentiable_loss(model, guide)


# Bad input: a clear error, and nothing is left half-changed.


@pytest.mark.parametrize(
    ("objective", "first"), [(o, ("param", "sample")[i % 2]) for i, o in enumerate(FAMILIES)]
)
def test_a_parameter_with_the_name_of_a_latent_is_refused_as_by_pyro(objective, first):
    def model():
        if first == "param":
            pyro.param("z", torch.ones(()))
        pyro.sample("z", dist.Normal(0.0, 1.0))
        if first == "sample":
            pyro.param("z", torch.ones(()))

    with pytest.raises(RuntimeError, match=f"z is already in the trace as a {first}"):
        OBJECTIVES[objective]().loss(model, lambda: pyro.sample("z", dist.Normal(0.0, 1.0)))


def normal_site(name, **kwargs):
    return pyro.sample(name, dist.Normal(0.0, 1.0), **kwargs)


def normal_sites(*names):
    return lambda: [normal_site(name) for name in names]


def not_finite(bad):
    def model():
        with pyro.plate("data", 3):
            a = normal_site("a")
            odd = dist.Unit(a + torch.tensor([0.0, bad, 0.0]), validate_args=False)
            pyro.sample("odd", odd, obs=torch.zeros(3, 0))

    def guide():
        with pyro.plate("data", 3):
            pyro.sample("a", dist.Normal(pyro.param("weight"), 1.0))

    return model, guide, "site 'odd' of the model .Unit"


def empty_minibatch(observe):
    with pyro.plate("data", 5, subsample=torch.tensor([], dtype=torch.long)) as idx:
        z = normal_site("z")
        if observe:
            pyro.sample("x", dist.Normal(z, 1.0), obs=torch.zeros(5)[idx])


def coin(kind=None):
    return lambda: pyro.sample("c", dist.Bernoulli(0.5), infer={"enumerate": kind} if kind else {})


REFUSED = {
    "missing from the guide": (
        normal_sites("a", "b"),
        normal_sites("a"),
        "site 'b' of the model is neither observed nor drawn",
    ),
    "missing from the model": (
        normal_sites("a"),
        normal_sites("a", "b"),
        "site 'b' of the guide is missing from the model.*is_auxiliary",
    ),
    "observed": (
        lambda: normal_site("a", obs=torch.tensor(0.0)),
        normal_sites("a"),
        "site 'a' of the guide is observed in the model",
    ),
    "outside of the support": (
        lambda: pyro.sample("a", dist.Gamma(1.0, 1.0)),
        lambda: pyro.sample("a", dist.Normal(-5.0, 0.1)),
        "site 'a' of the model.*\n?.*support",
    ),
    "nan": not_finite(math.nan),
    "infinite": not_finite(-math.inf),
    "empty minibatch": (
        lambda: empty_minibatch(True),
        lambda: empty_minibatch(False),
        r"plate 'data' has an empty minibatch \(0 of 5 data\)",
    ),
    "enumerated in turn": (
        coin("sequential"),
        lambda: None,
        "site 'c' of the model is marked for enumeration",
    ),
    "enumerated by the guide": (
        coin(),
        coin("parallel"),
        "site 'c' of the guide is marked for enumeration",
    ),
}
SUMS = {"enumerated in turn": {"rb-plus-3"}, "enumerated by the guide": {"rb-plus-3", "sis"}}


@pytest.mark.parametrize(
    ("objective", "name", "vectorize"),
    [
        (o, name, bool((i + j) % 2))
        for i, o in enumerate(FAMILIES)
        for j, name in enumerate(REFUSED)
        if o not in SUMS.get(name, ())
    ],
)
def test_bad_programs_are_refused_by_name_and_leave_nothing_behind(objective, name, vectorize):
    """The step raises, no gradient is left, and the next good step works."""
    model, guide, match = REFUSED[name]
    weight = pyro.param("weight", torch.tensor(1.0))
    elbo = OBJECTIVES[objective](vectorize_particles=vectorize)
    with pytest.raises(ValueError, match=match):
        elbo.loss_and_grads(model, guide)
    assert weight.unconstrained().grad is None
    assert not poutine.runtime._PYRO_STACK
    exact = ConjugateGaussian(N=3)
    assert math.isfinite(elbo.loss_and_grads(exact.model, exact.guide))


def test_enumeration_marks_can_be_ignored():
    def guide():
        pyro.sample("c", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})

    def model():
        pyro.sample("c", dist.Bernoulli(0.5))

    elbo = TraceSGVB_ELBO(strict_enumeration_warning=False)
    assert abs(elbo.loss(model, guide)) < 1e-12


@families
def test_what_is_no_program_is_refused(objective):
    elbo = OBJECTIVES[objective]()
    exact = ConjugateGaussian(N=3)
    with pytest.raises(ValueError, match=r"the guide must be a Pyro program, .* got None"):
        elbo.loss(exact.model, None)
    with pytest.raises(ValueError, match="the model must be a Pyro program"):
        elbo.loss(elbo, exact.guide)


@families_in_turn
def test_batch_dims_of_no_plate_are_refused(objective, vectorize):
    # They would be summed as if they were plates, or taken for particles.
    def program():
        return pyro.sample("z", dist.Normal(torch.zeros(2), 1.0))

    with pytest.raises(ValueError, match=r"site .z., invalid log_prob shape"):
        OBJECTIVES[objective](vectorize_particles=vectorize).loss(program, program)


# What a user would want to hear once.


def line(x):
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z, 1.0), obs=x)


def line_guide(x):
    loc = pyro.param("loc", torch.zeros(len(x)))
    with pyro.plate("data", len(x)):
        pyro.sample("z", dist.Normal(loc, 1.0))


@pytest.mark.parametrize("compiled", [False, True])
def test_parameters_of_a_guide_that_has_none_are_warned_of(compiled, caplog):
    loss = TraceSIS_ELBO(2)
    loss = CompiledELBO(loss, backend="eager") if compiled else loss
    guide, x = AutoNormal(line), torch.zeros(3)
    module = loss(line, guide)
    assert len(list(module.parameters())) == len(list(loss.parameters()))
    assert "AutoNormal has no parameters yet" in caplog.text
    module(x)
    caplog.clear()
    assert len(list(loss(line, guide).parameters())) == len(list(loss.parameters())) + 2
    assert not caplog.text
    list(loss(line, line_guide).parameters())
    assert "the guide is not a module" in caplog.text


class NoLatents(torch.nn.Module):
    def forward(self, x):
        pass


@pytest.mark.parametrize("guide", [NoLatents(), lambda x: None], ids=["module", "function"])
def test_a_guide_that_has_run_and_needs_no_parameters_is_not_warned_of(guide, caplog):
    class Mixture(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.loc = torch.nn.Parameter(torch.randn(3))

        def forward(self, x):
            with pyro.plate("data", len(x)):
                k = pyro.sample(
                    "k", dist.Categorical(torch.ones(3)), infer={"enumerate": "parallel"}
                )
                pyro.sample("x", dist.Normal(self.loc[k], 1.0), obs=x)

    elbo = TraceIWAE_ELBO(2)(Mixture(), guide)
    elbo(torch.randn(5)).backward()
    assert [name for name, _ in elbo.named_parameters()] == ["model.loc"]
    assert not caplog.text
    other = TraceIWAE_ELBO(2)(line, line_guide)
    other(torch.randn(5))
    list(other.parameters())
    assert "the guide is not a module" in caplog.text


@pytest.mark.parametrize(("loss", "learns"), [(TraceSIS_ELBO, True), (TraceIWAE_ELBO, False)])
def test_a_loss_that_learns_says_that_it_trains_a_second_model(loss, learns, caplog):
    loss, x = loss(2), torch.zeros(3)
    loss.loss_and_grads(line, line_guide, x)
    assert "one loss object" not in caplog.text
    for _ in range(2):
        loss.loss_and_grads(lambda x: line(x), line_guide, x)
    assert caplog.text.count("one loss object trains two models") == learns


@pytest.mark.parametrize("loss", [TraceSGVB_ELBO, TraceIWAE_ELBO, TraceSIS_ELBO])
@pytest.mark.parametrize("program", ["model", "guide"])
def test_errors_of_a_program_name_the_last_site_and_the_line(loss, program):
    def broken(x):
        (line if program == "model" else line_guide)(x)
        torch.zeros(2) @ torch.zeros(3)

    pair = (broken, line_guide) if program == "model" else (line, broken)
    last = "x" if program == "model" else "z"
    with pytest.raises(RuntimeError, match="size") as error:
        loss(2).loss(*pair, torch.zeros(3))
    text = "".join(traceback.format_exception(error.value))
    assert f"in the {program}, after site '{last}', at {__file__}" in text
    assert "torch.zeros(2) @ torch.zeros(3)" in text


def test_an_evaluation_names_the_line_that_computes_a_gradient():
    def guide(x, enabled):
        with torch.set_grad_enabled(enabled or torch.is_grad_enabled()):
            z = torch.zeros(len(x), requires_grad=True)
            (step,) = torch.autograd.grad(-(z**2 + (x - z) ** 2).sum() / 4, z)
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(step, 0.5**0.5))

    def model(x, enabled):
        line(x)

    x = torch.randn(3)
    trained = TraceIWAE_ELBO(2).loss_and_grads(model, guide, x, False)
    assert TraceIWAE_ELBO(2).loss(model, guide, x, True) == pytest.approx(trained)
    with pytest.raises(RuntimeError, match=r"torch.autograd.grad.* inside torch.enable_grad\(\)"):
        TraceIWAE_ELBO(2).loss(model, guide, x, False)


class MethodsOfOne(nn.Module):
    """A model and guide that are methods, as in Pyro's examples of autoencoders."""

    def __init__(self):
        super().__init__()
        self.decoder, self.encoder = nn.Linear(2, 3), nn.Linear(3, 2)

    def model(self, x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(self.decoder(z), 1.0).to_event(1), obs=x)

    def guide(self, x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(self.encoder(x), 1.0).to_event(1))


def test_the_module_of_two_methods_is_trained_by_their_loss(caplog):
    both, x = MethodsOfOne(), torch.randn(4, 3)
    module = TraceSIS_ELBO(2)(both.model, both.guide)
    names = [n for n, _ in module.named_parameters() if "elbo" not in n]
    assert len(names) == len([*both.parameters()]) == 4
    before = [p.detach().clone() for p in both.parameters()]
    optimizer = torch.optim.Adam(module.parameters(), 0.1)
    module(x).backward()
    optimizer.step()
    assert not any(map(torch.equal, before, both.parameters()))
    assert "not a module" not in caplog.text
    module.eval()
    assert not both.training
