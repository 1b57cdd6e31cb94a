"""The laws of the Rao-Blackwellized gradients: their mean is the exhaustive sum's."""

import math
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI
from pyro.nn import PyroModule

from pyro_mcvae import (
    NVIL,
    REBAR,
    RELAX,
    IndependentDraw,
    LeaveOneOut,
    SummedMean,
    TraceRaoBlackwell_ELBO,
)
from tests.elbos.discrete_programs import ALL, PROGRAMS, Discrete, normal, param, randn, x

SLOW = pytest.mark.slow
programs = pytest.mark.parametrize("name", PROGRAMS)
ESTIMATORS = {
    "k0": lambda: {"num_categories": 0},
    "k0-n3": lambda: {"num_categories": 0, "num_samples": 3},
    "k1": dict,
    "k2-n2": lambda: {"num_categories": 2, "num_samples": 2},
    "budget2": lambda: {"budget": 2},
    "k0-plus": lambda: {"num_categories": 0, "baseline": IndependentDraw()},
    "k1-plus": lambda: {"baseline": IndependentDraw()},
    "k1-loo": lambda: {"num_samples": 2, "baseline": LeaveOneOut()},
    "k1-summed": lambda: {"baseline": SummedMean()},
    "k1-exact-entropy": lambda: {"entropy": "exact"},
}


def repeated(elbo, program, steps):
    """Losses and gradients of several steps, one step per row."""
    losses, grads = [], []
    for i in range(steps):
        with pyro.validation_enabled(i == 0):
            losses.append(elbo.loss_and_grads(program.model, program.guide))
        grads.append(program.take_gradients())
    return torch.tensor(losses), {k: torch.stack([g[k] for g in grads]) for k in grads[0]}


def assert_means(program, elbo, steps=12, sigmas=6.5):
    exact_loss, exact = program.exact()
    losses, grads = repeated(elbo, program, steps)
    for key, result, truth in [
        ("loss", losses, exact_loss),
        *((k, grads[k], exact[k]) for k in exact),
    ]:
        error = result.std(0) / steps**0.5
        off = (result.mean(0) - truth).abs()
        assert (off <= sigmas * error + 1e-9).all(), f"{key}: off by {off}, error {error}"


@programs
def test_k_of_all_values_is_the_exact_sum(name):
    program = PROGRAMS[name]
    loss, exact = program.exact()
    for k, vectorize in ((4 if name == "binomial" else 3, False), (ALL, True)):
        elbo = TraceRaoBlackwell_ELBO(k, num_particles=2, vectorize_particles=vectorize)
        assert math.isclose(elbo.loss_and_grads(program.model, program.guide), loss, rel_tol=1e-9)
        result = program.take_gradients()
        for key, value in exact.items():
            torch.testing.assert_close(result[key], value)


def quick(name, estimator):
    """Every second program with one estimator, one with every estimator; the rest is slow."""
    place = list(PROGRAMS).index(name)
    turn = ("k1", None, "k1-plus", None)[place % 4]
    few = estimator == turn if name != "dependent" else estimator not in ("k0-n3", "k1", "k0-plus")
    return pytest.param(name, estimator, marks=() if few else pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "estimator"), [quick(name, e) for name in PROGRAMS for e in ESTIMATORS]
)
def test_the_mean_is_the_exact_sum(name, estimator):
    program = PROGRAMS[name]
    elbo = TraceRaoBlackwell_ELBO(
        num_particles=1000, vectorize_particles=True, **ESTIMATORS[estimator]()
    )
    assert_means(program, elbo)


def tables(size):
    """A fixed control variate that is far from zero."""
    weight = torch.linspace(-2.0, 3.0, size)
    return lambda relaxed, given: (relaxed**2 @ weight).sin() * 3.0 + relaxed[..., 0]


QUICK_CONTROLS = ("single", 0, "nvil"), ("dependent", 1, "relax"), ("single", 0, "rebar")


class Prediction(torch.nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = torch.nn.Parameter(torch.tensor(value))

    def forward(self, given):
        return self.value.expand(4, 1)


@pytest.mark.parametrize(
    ("name", "k", "kind"),
    [
        pytest.param(n, k, kind, marks=() if (n, k, kind) in QUICK_CONTROLS else SLOW)
        for n in ("single", "dependent", "one-hot", "masked", "scaled")
        for k in (0, 1, 2)
        for kind in ("nvil", "relax", "rebar")
    ],
)
def test_learned_control_variates_leave_the_mean(name, kind, k):
    program = PROGRAMS[name]
    baseline = {
        "nvil": lambda: NVIL(Prediction(-3.0)),
        "relax": lambda: RELAX(lambda y, x: tables(y.shape[-1])(y, x)),
        "rebar": lambda: REBAR(lambda y, x: tables(y.shape[-1])(y, x), temperature=0.7, scale=0.5),
    }[kind]()
    annotated = with_input(program, torch.zeros(4))
    elbo = TraceRaoBlackwell_ELBO(
        k, num_particles=1000, vectorize_particles=True, baseline=baseline
    )
    assert_means(annotated, elbo)


def with_input(program, value):
    def guide():
        with poutine.infer_config(config_fn=lambda s: {"mcvae": {"baseline_input": value}}):
            program.guide()

    return replace(program, guide=guide)


@pytest.mark.parametrize(
    ("kind", "interface"),
    [
        ("nvil", "svi"),
        pytest.param("relax", "module", marks=pytest.mark.slow),
        pytest.param("nvil", "module", marks=pytest.mark.slow),
        pytest.param("relax", "svi", marks=pytest.mark.slow),
        pytest.param("rebar", "svi", marks=pytest.mark.slow),
        pytest.param("rebar", "module", marks=pytest.mark.slow),
    ],
)
def test_learned_parts_train_and_the_noise_falls(kind, interface):
    locs = torch.tensor([-1.0, 0.5, 4.0])
    data = torch.tensor([3.0, 2.0, 2.5, 3.5])

    def model(x):
        with pyro.plate("data", 4):
            y = pyro.sample("y", dist.OneHotCategorical(torch.ones(3)))
            pyro.sample("x", dist.Normal(y @ locs, 1.0), obs=x)

    class Guide(PyroModule):
        def __init__(self):
            super().__init__()
            self.logits = torch.nn.Parameter(torch.zeros(4, 3))

        def forward(self, x):
            with pyro.plate("data", 4):
                pyro.sample("y", dist.OneHotCategorical(logits=self.logits))

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2 if kind == "nvil" else 4, 1)

        def forward(self, *given):
            given = [g if g.dim() > 1 else torch.stack([g, g**2], -1) for g in given]
            if len(given) == 1:
                return self.layer(given[0])
            relaxed, x = given
            return self.layer(torch.cat([relaxed, x[:, :1].expand(relaxed.shape[:-1] + (1,))], -1))

    def cost(y, x):
        return -0.5 * (x - y @ locs) ** 2

    baseline = {
        "nvil": lambda: NVIL(Network()),
        "relax": lambda: RELAX(Network()),
        "rebar": lambda: REBAR(cost, scale=0.1),
    }[kind]()
    guide = Guide()
    elbo = TraceRaoBlackwell_ELBO(0, baseline=baseline)
    before = {k: v.detach().clone() for k, v in baseline.named_parameters()}
    if interface == "svi":
        fixed = {"lr": 0.02}

        def rates(name):
            return {"lr": 0.0} if "logits" in name else fixed

        svi = SVI(model, guide, pyro.optim.Adam(rates), loss=elbo)
        svi.step(data)
        with pyro.validation_enabled(False):
            for _ in range(200):
                svi.step(data)
    else:
        module = elbo(model, guide)
        learned = [p for n, p in module.named_parameters() if "logits" not in n]
        assert len(learned) == len(before)
        optimizer = torch.optim.Adam(learned, lr=0.02)
        for _ in range(200):
            optimizer.zero_grad()
            module(data).backward()
            optimizer.step()
    assert all((v != before[k]).all() for k, v in baseline.named_parameters())

    def noise(loss):
        result = []
        with pyro.validation_enabled(False):
            for _ in range(90):
                guide.zero_grad()
                loss.loss_and_grads(model, guide, data)
                result.append(guide.logits.grad.clone())
        return torch.stack(result).var(0).sum()

    assert noise(elbo) < 0.7 * noise(TraceRaoBlackwell_ELBO(0))


def test_reparameterized_sites_behind_a_discrete_one():
    def model():
        with pyro.plate("data", 3):
            y = pyro.sample("y", dist.Categorical(logits=param("prior", 3)))
            z = pyro.sample("z", dist.Normal(param("mu", 3)[y], 1.0))
            pyro.sample("x", dist.Normal(z, 0.5), obs=torch.tensor([0.3, -1.0, 2.0]))

    def guide():
        with pyro.plate("data", 3):
            y = pyro.sample("y", dist.Categorical(logits=param("q", 3, 3)))
            pyro.sample("z", dist.Normal(param("loc", 3)[y], param("scale", 3).exp()[y]))

    x = torch.tensor([0.3, -1.0, 2.0])[:, None]
    names = {"prior": (3,), "mu": (3,), "q": (3, 3), "loc": (3,), "scale": (3,)}
    values = {n: randn(*s, seed=sum(map(ord, n))).requires_grad_() for n, s in names.items()}
    log_q = values["q"].log_softmax(-1)
    loc, variance = values["loc"], (2 * values["scale"]).exp()
    # E log N(x; z, 0.5), E log N(z; mu, 1) and the entropies, of each category.
    inner = -((x - loc) ** 2 + variance) / 0.5 - math.log(0.5)
    inner = inner - ((loc - values["mu"]) ** 2 + variance) / 2 + values["scale"] + 0.5
    inner = inner - 0.5 * math.log(2 * math.pi)
    elbo = (log_q.exp() * (inner + values["prior"].log_softmax(-1) - log_q)).sum()
    grads = torch.autograd.grad(-elbo, list(values.values()))
    exact = dict(zip(values, grads, strict=True))

    class Known(Discrete):
        def exact(self):
            return -elbo.item(), exact

    program = Known(model, guide)
    for options in (
        {},
        {"num_categories": 0},
        {"num_categories": ALL},
        {"entropy": "exact"},
        {"baseline": IndependentDraw()},
    ):
        loss = TraceRaoBlackwell_ELBO(num_particles=1000, vectorize_particles=True, **options)
        assert_means(program, loss)


def vector_model():
    with pyro.plate("data", 2):
        b = pyro.sample("b", dist.Bernoulli(logits=param("p", 3)).to_event(1))
        normal("x", (b @ param("w", 3)) ** 2, x(2))


def vector_guide():
    with pyro.plate("data", 2):
        pyro.sample("b", dist.Bernoulli(logits=param("q", 2, 3)).to_event(1))


def vector_exact():
    """By the same programs with one site for each entry."""

    def model():
        with pyro.plate("data", 2):
            b = [pyro.sample(f"b{i}", dist.Bernoulli(logits=param("p", 3)[i])) for i in range(3)]
            normal("x", sum(b[i] * param("w", 3)[i] for i in range(3)) ** 2, x(2))

    def guide():
        with pyro.plate("data", 2):
            for i in range(3):
                pyro.sample(f"b{i}", dist.Bernoulli(logits=param("q", 2, 3)[:, i]))

    return Discrete(model, guide).exact()


@pytest.mark.parametrize(
    "estimator",
    ["k1", "k1-loo", *(pytest.param(e, marks=SLOW) for e in ("k0", "k2-n2", "budget2", "k1-plus"))],
)
def test_a_vector_is_one_variable_over_the_product(estimator):
    class Vector(Discrete):
        def exact(self):
            return vector_exact()

    program = Vector(vector_model, vector_guide)
    loss, _ = program.exact()
    assert math.isclose(TraceRaoBlackwell_ELBO(8).loss(program.model, program.guide), loss)
    options = ESTIMATORS[estimator]()
    assert_means(
        program, TraceRaoBlackwell_ELBO(num_particles=1000, vectorize_particles=True, **options)
    )


COUNTS = {
    "poisson": lambda raw: dist.Poisson(raw.exp()),
    "geometric": lambda raw: dist.Geometric(logits=raw),
}


@pytest.mark.parametrize(
    ("kind", "estimator"),
    [
        *[("poisson", "k0"), ("geometric", "k1"), ("poisson", "k2-n2"), ("geometric", "budget2")],
        *(pytest.param("poisson", e, marks=SLOW) for e in ("k1", "budget2", "k1-loo")),
        *(pytest.param("geometric", e, marks=SLOW) for e in ("k0", "k2-n2", "k1-loo")),
    ],
)
def test_countable_sites(kind, estimator):
    make = COUNTS[kind]

    def model():
        with pyro.plate("data", 3):
            y = pyro.sample("y", make(torch.tensor(0.4)))
            normal("x", param("w") * (y + 0.1).log(), x(3))

    def guide():
        with pyro.plate("data", 3):
            pyro.sample("y", make(0.5 * param("q", 3)))

    class Truncated(Discrete):
        def exact(self):
            w, q = (
                param(n, *s).detach().clone().requires_grad_() for n, s in (("w", ()), ("q", (3,)))
            )
            y = torch.arange(400.0)[:, None]
            log_q = make(0.5 * q).log_prob(y)
            cost = make(torch.tensor(0.4)).log_prob(y) - log_q
            cost = cost + dist.Normal(w * (y + 0.1).log(), 0.8).log_prob(x(3))
            loss = -(log_q.exp() * cost).sum()
            grads = torch.autograd.grad(loss, [w, q])
            return loss.item(), dict(zip(["w", "q"], grads, strict=True))

    options = ESTIMATORS[estimator]()
    elbo = TraceRaoBlackwell_ELBO(num_particles=320, vectorize_particles=True, **options)
    assert_means(Truncated(model, guide), elbo)


@pytest.mark.parametrize(
    "estimator",
    [
        "budget2",
        "k1-plus",
        *(pytest.param(e, marks=SLOW) for e in ("k1", "k1-loo", "k1-exact-entropy")),
    ],
)
def test_vectors_with_too_many_values_to_list(estimator, monkeypatch):
    monkeypatch.setattr("pyro_mcvae.programs.supports._MAX_JOINT", 1)

    class Vector(Discrete):
        def exact(self):
            return vector_exact()

    options = ESTIMATORS[estimator]()
    elbo = TraceRaoBlackwell_ELBO(num_particles=1000, vectorize_particles=True, **options)
    assert_means(Vector(vector_model, vector_guide), elbo)
    with pytest.raises(ValueError, match=r"guide site 'b'.*too many values to list.*pass a finite"):
        TraceRaoBlackwell_ELBO(ALL).loss(vector_model, vector_guide)
