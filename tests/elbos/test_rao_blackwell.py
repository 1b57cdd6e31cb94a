"""
Costs of a step, noise that must not leak, degenerate probabilities, learned parts, and errors.

That values and gradients are those of the sum over all values is in test_discrete_sums.py.
"""

import math

import pyro
import pyro.distributions as dist
import pyro.optim
import pytest
import torch
from pyro.infer import SVI, TraceEnum_ELBO, config_enumerate
from pyro.infer.autoguide import AutoNormalMessenger
from pyro.infer.autoguide.effect import GuideMessenger
from pyro.ops.indexing import Vindex

from pyro_mcvae import (
    NVIL,
    REBAR,
    RELAX,
    IndependentDraw,
    LeaveOneOut,
    TraceRaoBlackwell_ELBO,
    TraceSIS_ELBO,
)
from pyro_mcvae.checks.vectorization import BatchCheck
from tests.elbos.discrete_programs import ALL, PROGRAMS, param, take_gradients, x
from tests.estimates import assert_mean


def one_site(logits, evaluated=None, infer=None, vector=False):
    def model():
        with pyro.plate("data", len(logits)):
            y = pyro.sample("y", dist.Categorical(torch.ones(logits.shape[-1])))
            if evaluated is not None:
                evaluated.append(y.shape)
            pyro.sample("x", dist.Normal(y.to(logits.dtype), 1.0), obs=torch.ones(len(logits)))

    def guide():
        logits_q = pyro.param("logits", lambda: logits.clone())
        with pyro.plate("data", len(logits)):
            pyro.sample("y", dist.Categorical(logits=logits_q), infer=infer or {})

    return model, guide


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"num_categories": 2, "num_samples": 3}, 5),
        ({"num_categories": 2, "num_samples": 3, "baseline": IndependentDraw()}, 6),
        ({"num_categories": 1, "num_samples": 2, "baseline": LeaveOneOut()}, 3),
        ({"budget": 4}, 4),
        ({"num_categories": 1, "num_samples": 1, "baseline": REBAR(lambda y, x: y[..., 0])}, 2),
        ({"num_categories": 0}, None),
    ],
)
def test_evaluations_are_k_plus_n_and_one_with_an_independent_draw(options, count):
    shapes = []
    model, guide = one_site(torch.zeros(5, 10), shapes)
    elbo = TraceRaoBlackwell_ELBO(**options)
    for _ in range(3):  # the first two also analyse the programs
        elbo.loss_and_grads(model, guide)
    assert shapes[-1] == ((5,) if count is None else (count, 5))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_categories": 0},
        {"num_categories": 2},
        {"num_categories": math.inf},
        {"budget": 2},
        {"baseline": IndependentDraw()},
        {"num_samples": 2, "baseline": LeaveOneOut()},
        {"baseline": REBAR(lambda y, x: y[..., 0])},
        {"entropy": "exact"},
    ],
)
def test_degenerate_probabilities_give_numbers(options):
    """Data with a value that cannot be, with ties, and with one value only."""
    logits = torch.tensor([[0.0, 0.0, -math.inf], [0.0, 0.0, 0.0], [0.0, -math.inf, -math.inf]])
    for given in (logits, logits[:, :1]):
        pyro.clear_param_store()
        model, guide = one_site(given)
        elbo = TraceRaoBlackwell_ELBO(**options)
        assert math.isfinite(elbo.loss_and_grads(model, guide))
        assert pyro.param("logits").grad.isfinite().all()
        assert elbo.differentiable_loss(model, guide).isfinite()
        assert elbo.bounds(model, guide).per_datum.isfinite().all()


def test_costs_that_do_not_depend_on_a_site_add_no_noise():
    def model(offset):
        with pyro.plate("data", 3):
            y = pyro.sample("y", dist.Categorical(logits=param("prior", 3)))
            u = pyro.sample("u", dist.Categorical(logits=param("other", 3)))
            pyro.sample("x", dist.Normal(param("mu", 3)[y], 1.0), obs=torch.zeros(3))
            pyro.sample("w", dist.Normal(param("nu", 3)[u] + offset, 1.0), obs=torch.zeros(3))
        pyro.factor("constant", torch.tensor(100.0) * offset)

    def guide(offset):
        with pyro.plate("data", 3):
            pyro.sample("y", dist.Categorical(logits=param("q", 3, 3)))
            pyro.sample("u", dist.Categorical(logits=param("r", 3, 3)))

    for options in ({}, {"num_categories": 0}, {"num_categories": 0, "num_samples": 2}):
        result = []
        for offset in (0.0, 50.0):
            pyro.set_rng_seed(3)
            TraceRaoBlackwell_ELBO(**options).loss_and_grads(model, guide, offset)
            result.append(pyro.param("q").grad.clone())
            pyro.param("q").grad = None
        torch.testing.assert_close(*result)


def continuous(infer):
    def model():
        pyro.sample("z", dist.Normal(0.0, 1.0))

    def guide():
        pyro.sample("z", dist.Normal(0.0, 1.0), infer=infer)

    return model, guide


@pytest.mark.parametrize("infer", [{}, {"enumerate": "parallel"}, {"mcvae": {"num_categories": 2}}])
@pytest.mark.parametrize(
    "make",
    [
        lambda: TraceRaoBlackwell_ELBO(math.inf),
        TraceRaoBlackwell_ELBO,
        lambda: TraceSIS_ELBO(2),
    ],
)
def test_discrete_values_with_a_gradient_are_not_summed(make, infer):
    """Sampled, and so 50 standard errors from the gradient of the sum that was asked for."""

    def model():
        with pyro.plate("data", 3):
            y = pyro.sample("y", dist.OneHotCategorical(torch.ones(3)))
            pyro.sample("x", dist.Normal(y @ torch.arange(3.0), 1.0), obs=torch.ones(3))

    def guide():
        with pyro.plate("data", 3):
            probs = pyro.param("probs", torch.ones(3, 3))
            pyro.sample("y", dist.OneHotCategoricalStraightThrough(probs), infer=infer)

    with pytest.raises(ValueError, match=r"'y' .OneHot.*StraightThrough. passes .* OneHotCategor"):
        make().loss_and_grads(model, guide)


def test_sites_that_cannot_have_slots_are_named():
    elbo = TraceRaoBlackwell_ELBO()
    with pytest.raises(ValueError, match=r"guide site 'z' .Normal. is continuous.*num_categories"):
        elbo.loss_and_grads(*continuous({"mcvae": {"num_categories": 2}}))
    with pytest.raises(ValueError, match=r"guide site 'y', infer=.*: num_categories .* -1"):
        elbo.loss_and_grads(*one_site(torch.zeros(2, 3), infer={"mcvae": {"num_categories": -1}}))
    with pytest.raises(ValueError, match=r"'y' has 3 values.*num_samples=0 leaves the others out"):
        TraceRaoBlackwell_ELBO(1, 0).loss_and_grads(*one_site(torch.zeros(2, 3)))


def test_an_nvil_network_of_the_wrong_shape():
    class Wrong(torch.nn.Module):
        def forward(self, given):
            return torch.zeros(7)

    model, guide = one_site(torch.zeros(5, 3))
    elbo = TraceRaoBlackwell_ELBO(baseline=NVIL(Wrong()))
    with pytest.raises(ValueError, match=r"got none: pass another one by"):
        elbo.loss_and_grads(model, guide)
    site = {"mcvae": {"baseline_input": x(5)}}
    with pytest.raises(ValueError, match=r"must return shape .*5,.*got \(7,\)"):
        elbo.loss_and_grads(*one_site(torch.zeros(5, 3), infer=site))


class Scored(GuideMessenger):
    """Draws that are not reparameterized, discrete ones from their prior."""

    def get_posterior(self, name, prior):
        if prior.support.is_discrete:
            return prior
        loc = pyro.param("loc", torch.full(prior.batch_shape, 0.2))
        return dist.Normal(loc, 1.0).has_rsample_(False)


def test_messenger_guides_have_no_slots():
    def model():
        pyro.sample("z", dist.Normal(0.0, 1.0))

    def mixed():
        pyro.sample("y", dist.Bernoulli(0.3))
        model()

    assert math.isfinite(TraceRaoBlackwell_ELBO().loss_and_grads(model, AutoNormalMessenger(model)))
    with pytest.raises(ValueError, match=r"site 'y' .* can have no slots"):
        TraceRaoBlackwell_ELBO().loss(mixed, Scored(mixed))


def test_messenger_guides_score_continuous_draws():
    def model():
        with pyro.plate("data", 4000):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=torch.tensor(0.7))

    TraceRaoBlackwell_ELBO().loss_and_grads(model, Scored(model))
    assert_mean(pyro.param("loc").grad, 0.2 + (0.2 - 0.7))


@pytest.mark.slow
def test_sequences_whose_slots_multiply_are_refused_and_the_remedies_work():
    def sequence(observe):
        y = None
        for t in pyro.markov(range(30)):
            logits = torch.zeros(3) if y is None else Vindex(param("a", 3, 3))[y, :]
            y = pyro.sample(f"y{t}", dist.Categorical(logits=logits))
            if observe:
                pyro.sample(f"x{t}", dist.Normal(y.to(logits.dtype), 1.0), obs=torch.tensor(1.0))

    programs = (lambda: sequence(True)), (lambda: sequence(False))
    with pytest.raises(ValueError, match=r"site 'y\d+' would take \d+ slots.*math.inf.*once by"):
        TraceRaoBlackwell_ELBO().loss_and_grads(*programs)
    assert math.isfinite(TraceRaoBlackwell_ELBO(0).loss_and_grads(*programs))
    exact = TraceEnum_ELBO(max_plate_nesting=0).loss(programs[0], config_enumerate(programs[1]))
    assert math.isclose(TraceRaoBlackwell_ELBO(math.inf).loss(*programs), exact)


def test_sequential_enumeration_is_the_exact_sum():
    logits = torch.tensor([[0.2, -1.0, 0.4], [1.0, 0.0, 0.3]])
    losses = [
        TraceRaoBlackwell_ELBO(num).loss(*one_site(logits, infer=infer))
        for num, infer in ((math.inf, None), (1, {"enumerate": "sequential"}))
    ]
    model, guide = one_site(logits)
    losses.append(TraceEnum_ELBO().loss(model, config_enumerate(guide, "sequential")))
    assert losses == pytest.approx(losses[:1] * 3, rel=1e-9)


@pytest.mark.parametrize("baseline", [None, LeaveOneOut()])
def test_draws_of_one_site_have_the_mean_of_the_exact_sum(baseline):
    def gradients(elbo, infer, count):
        logits = torch.tensor([0.2, -1.0, 0.4]).expand(count, 3)
        pyro.clear_param_store()
        elbo.loss_and_grads(*one_site(logits, infer=infer))
        return next(p for _, p in pyro.get_param_store().named_parameters()).grad

    exact = gradients(TraceRaoBlackwell_ELBO(math.inf), None, 1)[0]
    drawn = {"enumerate": "parallel", "num_samples": 4}
    elbo = TraceRaoBlackwell_ELBO(num_samples=2, baseline=baseline)
    assert_mean(gradients(elbo, drawn, 4000), exact)


def test_a_baseline_that_needs_more_draws_of_one_site_says_so():
    drawn = {"enumerate": "parallel", "num_samples": 1}
    with pytest.raises(
        ValueError, match=r"site 'y'.*LeaveOneOut compares.*num_samples >= 2, got 1"
    ):
        TraceRaoBlackwell_ELBO(num_samples=2, baseline=LeaveOneOut()).loss(
            *one_site(torch.zeros(2, 3), infer=drawn)
        )


def test_continuous_sites_with_draws_of_their_own_are_drawn_once(caplog):
    losses = []
    for infer in (None, {"enumerate": "parallel", "num_samples": 10}):
        pyro.set_rng_seed(0)
        losses.append(TraceRaoBlackwell_ELBO(num_particles=3).loss(*continuous(infer or {})))
    assert losses[0] == losses[1]
    assert "'z' (Normal) is marked for 10 draws" in caplog.text


class Network(torch.nn.Module):
    """A prediction of the cost from the data, or from a relaxed value beside them."""

    def __init__(self, size):
        super().__init__()
        self.layer = torch.nn.Linear(size, 1)

    def forward(self, *given):
        shape = torch.broadcast_shapes(*(g.shape[:-1] for g in given))
        both = torch.cat([g.expand(*shape, -1) for g in given], -1)
        return self.layer(torch.cat([both, both**2], -1))


@pytest.mark.parametrize(
    "kind", ["nvil", *(pytest.param(k, marks=pytest.mark.slow) for k in ("relax", "rebar"))]
)
def test_learned_parts_train_and_the_noise_falls(kind):
    locs, data = torch.tensor([-1.0, 0.5, 4.0]), torch.tensor([[3.0], [2.0], [2.5], [3.5]])

    def model(x):
        with pyro.plate("data", 4):
            y = pyro.sample("y", dist.OneHotCategorical(torch.ones(3)))
            pyro.sample("x", dist.Normal(y @ locs, 1.0), obs=x.squeeze(-1))

    def guide(x):
        logits = pyro.param("logits", torch.zeros(4, 3))
        with pyro.plate("data", 4):
            pyro.sample("y", dist.OneHotCategorical(logits=logits))

    def cost(y, x):
        return -0.5 * (x.squeeze(-1) - y @ locs) ** 2

    baseline = {
        "nvil": lambda: NVIL(Network(2)),
        "relax": lambda: RELAX(Network(8)),
        "rebar": lambda: REBAR(cost, scale=0.1),
    }[kind]()
    elbo = TraceRaoBlackwell_ELBO(0, baseline=baseline)
    before = {k: v.detach().clone() for k, v in baseline.named_parameters()}
    fixed = pyro.optim.Adam(lambda name: {"lr": 0.0 if "logits" in name else 0.02})
    svi = SVI(model, guide, fixed, loss=elbo)
    for i in range(120):
        with pyro.validation_enabled(i == 0):
            svi.step(data)
    assert all((v != before[k]).all() for k, v in baseline.named_parameters())

    def noise(loss):
        result = []
        for _ in range(60):
            with pyro.validation_enabled(False):
                loss.loss_and_grads(model, guide, data)
            result.append(take_gradients()["logits"])
        return torch.stack(result).var(0).sum()

    assert noise(elbo) < 0.7 * noise(TraceRaoBlackwell_ELBO(0))


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


@pytest.mark.parametrize("options", [{}, {"max_plate_nesting": 1}], ids=["open", "declared"])
@pytest.mark.parametrize("k", [1, math.inf])
def test_a_program_that_runs_only_with_an_enumerated_dim_is_refused_with_a_remedy(k, options):
    """As pyroved's: ``z.repeat(number of classes, 1)`` beside the enumerated values."""

    def model(x):
        with pyro.plate("data", 12):
            z = pyro.sample("z", dist.Normal(torch.zeros(12, 2), 1.0).to_event(1))
            y = pyro.sample("y", dist.OneHotCategorical(torch.ones(12, 3)))
            both = torch.cat([z.repeat(3, 1), y.reshape(-1, 3)], -1)
            loc = both.sum(-1).reshape(y.shape[:-1])
            pyro.sample("x", dist.Normal(loc, 1.0), obs=x)

    @config_enumerate(default="parallel", expand=True)
    def guide(x):
        loc = pyro.param("loc", torch.zeros(12, 2))
        with pyro.plate("data", 12):
            pyro.sample("z", dist.Normal(loc, 1.0).to_event(1))
            pyro.sample("y", dist.OneHotCategorical(torch.ones(12, 3)))

    TraceEnum_ELBO(max_plate_nesting=1).loss(model, guide, torch.zeros(12))
    with pytest.raises(RuntimeError, match=r"Site 'y' is marked for enumeration.*TraceEnum_ELBO"):
        TraceRaoBlackwell_ELBO(k, **options).loss(model, guide, torch.zeros(12))


@pytest.mark.slow
def test_steps_of_an_enumerating_model_share_an_analysis(monkeypatch):
    """Slots in rows have other operations than slots in dims, which are tried first."""
    probs = torch.rand(2, 2, 3).softmax(-1)

    def model(x):
        a = pyro.sample("a", dist.Categorical(torch.ones(2)), infer={"enumerate": "parallel"})
        with pyro.plate("data", 2):
            b = pyro.sample("b", dist.Categorical(torch.ones(2)))
            pyro.sample("x", dist.Categorical(Vindex(probs)[a, b]), obs=x)

    def guide(x):
        logits = pyro.param("logits", torch.zeros(2))
        with pyro.plate("data", 2):
            pyro.sample("b", dist.Categorical(logits=logits))

    checks, check = [], BatchCheck.check
    monkeypatch.setattr(BatchCheck, "check", lambda *args: checks.append(check(*args)))
    loss = TraceRaoBlackwell_ELBO(math.inf)
    for _ in range(24):
        loss.loss_and_grads(model, guide, torch.tensor([1, 2]))
    # In the first two steps, and in uses 2, 4, 8 and 16 of the analysis.
    assert len(checks) <= 8
