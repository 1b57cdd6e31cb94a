"""Programs as users write them: every objective trains each of them, looped and vectorised."""

import math

import pyro
import pyro.distributions as dist
import pyro.optim
import pytest
import torch
from pyro import poutine
from pyro.contrib.easyguide import easy_guide
from pyro.distributions import constraints
from pyro.distributions import transforms as T
from pyro.infer import SVI
from pyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoGuideList,
    AutoIAFNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
    AutoNormalMessenger,
    AutoStructured,
)
from pyro.poutine.util import site_is_subsample

from pyro_mcvae import (
    MALA,
    MonteCarloEM,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceSGVB_ELBO,
    TraceSIS_ELBO,
)
from pyro_mcvae.checks.masks import with_priors
from tests.plain_traces import plain_traces, values_of

OBJECTIVES = {
    "sgvb": lambda **k: TraceSGVB_ELBO(num_particles=2, **k),
    "iwae": lambda **k: TraceIWAE_ELBO(num_particles=4, **k),
    "iwae-reparam": lambda **k: TraceIWAE_ELBO(4, gradient_estimator="reparam", **k),
    "rb": lambda **k: TraceRaoBlackwell_ELBO(num_particles=2, **k),
    "sis": lambda **k: TraceSIS_ELBO(2, num_particles=2, **k),
    "sis-reweighted": lambda **k: TraceSIS_ELBO(2, gradient_estimator="reweighted", **k),
    "ais": lambda **k: TraceAIS_ELBO(2, **k),
    "mcem": lambda **k: MonteCarloEM(1, MALA(), num_particles=2, **k),
}
CHAINS = ("sis", "sis-reweighted", "ais", "mcem")


def refusal(objective, name):
    """What a chain says of a program that it does not take; None for all others."""
    if objective in CHAINS and name == "auto-delta":
        return "is a point mass"
    if objective == "mcem" and name == "mixture":
        return "site 'c' is discrete"
    if objective in ("sis-reweighted", "mcem") and name == "auto-messenger":
        return "runs both together"
    return None


N = 12
X = torch.tensor([1.9, 0.3, 1.1, 2.5, -0.4, 1.4, 0.8, 2.2, 1.7, 0.1, 1.3, 0.9])


def data():
    return X.to(torch.get_default_dtype())


def hierarchy(subsample_size=None, subsample=None):
    loc = pyro.sample("loc", dist.Normal(0.0, 2.0))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
    with pyro.plate("data", N, subsample_size, subsample) as idx:
        z = pyro.sample("z", dist.Normal(loc, scale))
        pyro.sample("x", dist.Normal(z, 0.5), obs=data()[idx])


def hierarchy_guide(subsample_size=None, subsample=None):
    loc = pyro.param("loc_q", torch.tensor(-0.5))
    pyro.sample("loc", dist.Normal(loc, 0.5))
    pyro.sample("scale", dist.LogNormal(pyro.param("scale_q", torch.tensor(0.5)), 0.3))
    slope = pyro.param("slope", torch.tensor(0.1))
    with pyro.plate("data", N, subsample_size, subsample) as idx:
        pyro.sample("z", dist.Normal(slope * data()[idx], 0.5))


def minibatches(model, guide, **options):
    return (lambda: model(**options)), (lambda: guide(**options))


def nested():
    with pyro.plate("groups", 3, dim=-1):
        a = pyro.sample("a", dist.Normal(0.0, 2.0))
        with pyro.plate("members", 4, dim=-2):
            b = pyro.sample("b", dist.Normal(a, 1.0))
            pyro.sample("x", dist.Normal(b, 0.5), obs=data().reshape(4, 3))


def crossed():
    rows, columns = pyro.plate("rows", 3, dim=-1), pyro.plate("columns", 4, dim=-2)
    with rows:
        u = pyro.sample("u", dist.Normal(1.0, 1.0))
    with columns:
        v = pyro.sample("v", dist.Normal(0.0, 1.0))
    with rows, columns:
        pyro.sample("x", dist.Normal(u + v, 0.5), obs=data().reshape(4, 3))


def two_plates():
    for name, part in (("left", data()[:5]), ("right", data()[5:])):
        with pyro.plate(name, len(part), dim=-1):
            z = pyro.sample(f"z_{name}", dist.Normal(0.0, 1.0))
            pyro.sample(f"x_{name}", dist.Normal(z, 0.5), obs=part)


def turns(observe):
    for i in pyro.plate("data", N, subsample_size=5):
        x = data()[i]
        if observe:
            z = pyro.sample(f"z_{i}", dist.Normal(0.0, 1.0))
            pyro.sample(f"x_{i}", dist.Normal(z, 0.5), obs=x)
        else:
            slope = pyro.param("slope", torch.tensor(0.1))
            pyro.sample(f"z_{i}", dist.Normal(slope * x, 0.5))


def chain(observe):
    with pyro.plate("data", 3):
        z = torch.zeros(3)
        for t in pyro.markov(range(4)):
            x = data().reshape(4, 3)[t]
            if observe:
                z = pyro.sample(f"z_{t}", dist.Normal(0.9 * z, 1.0))
                pyro.sample(f"x_{t}", dist.Normal(z, 0.5), obs=x)
            else:
                f = pyro.param("f", torch.tensor([0.1, 0.1]))
                z = pyro.sample(f"z_{t}", dist.Normal(f[0] * z + f[1] * x, 0.6))


def ragged():
    lengths = torch.tensor([4, 2, 1])
    with pyro.plate("data", 3):
        z = torch.zeros(3)
        for t in range(4):
            with poutine.mask(mask=t < lengths):
                z = pyro.sample(f"z_{t}", dist.Normal(0.9 * z, 1.0))
                pyro.sample(f"x_{t}", dist.Normal(z, 0.5), obs=data().reshape(4, 3)[t])


def constrained():
    with pyro.plate("data", N):
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
        pyro.sample("x", dist.Normal(rate * weights[..., 0], 1.0), obs=data())


def constrained_guide():
    concentration = pyro.param("concentration", torch.tensor(5.0), constraint=constraints.positive)
    with pyro.plate("data", N):
        pyro.sample("rate", dist.Gamma(concentration, 1.0))
        pyro.sample("weights", dist.Dirichlet(pyro.param("alpha", torch.ones(3)).exp()))


def mixture():
    with pyro.plate("data", N):
        c = pyro.sample("c", dist.Categorical(torch.ones(3)))
        z = pyro.sample("z", dist.Normal(c.to(data().dtype), 0.5))
        pyro.sample("x", dist.Normal(z, 0.5), obs=data())


def mixture_guide():
    logits = pyro.param("logits", torch.tensor([1.0, 0.0, -1.0]))
    locs = pyro.param("locs", torch.zeros(3))
    with pyro.plate("data", N):
        c = pyro.sample("c", dist.Categorical(logits=logits + data()[:, None] * torch.arange(3)))
        pyro.sample("z", dist.Normal(locs[c], 0.5))


def correlated():
    cholesky = pyro.sample("cholesky", dist.LKJCholesky(2, torch.tensor(1.0)))
    with pyro.plate("data", 6):
        pyro.sample(
            "x",
            dist.MultivariateNormal(torch.ones(2), scale_tril=cholesky),
            obs=data().reshape(6, 2),
        )


def missing():
    observed = torch.arange(N) % 3 > 0
    with pyro.plate("data", N):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        x = pyro.sample("x", dist.Normal(z, 0.5), obs=data(), obs_mask=observed)
        pyro.deterministic("twice", 2 * x)
        pyro.factor("prefer", -0.1 * z**2)


def outside():
    with pyro.plate("data", 3):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
    pyro.sample("sum", dist.Normal(z.sum(-1, keepdim=True), 0.5), obs=torch.tensor(3.0))


def deep():
    with pyro.plate("data", N):
        z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("x", dist.Normal(z[..., 0] * z[..., 1], 0.5), obs=data())


def flow_guide():
    flow = pyro.module("flow", FLOW[torch.get_default_dtype()])
    with pyro.plate("data", N):
        base = dist.Normal(data()[:, None].expand(N, 2) - 3.0, 0.5).to_event(1)
        pyro.sample("z", dist.TransformedDistribution(base, [flow]))


FLOW = {}


def easy(model):
    @easy_guide(model)
    def guide(self):
        group = self.group(match="loc|scale")
        size = group.event_shape[0]
        loc = pyro.param("joint_loc", torch.zeros(size))
        group.sample("joint", dist.MultivariateNormal(loc, scale_tril=0.5 * torch.eye(size)))
        slope = pyro.param("slope", torch.tensor(0.1))
        with self.plate("data", N):
            pyro.sample("z", dist.Normal(slope * data(), 0.5))

    return guide


def listed(model):
    guide = AutoGuideList(model)
    guide.append(AutoDelta(poutine.block(model, expose=["loc", "scale"])))
    guide.append(AutoNormal(poutine.block(model, hide=["loc", "scale"])))
    return guide


PROGRAMS = {
    "hierarchy": lambda: (hierarchy, hierarchy_guide),
    "hierarchy-subsampled": lambda: minibatches(hierarchy, hierarchy_guide, subsample_size=4),
    "hierarchy-loader": lambda: minibatches(
        hierarchy, hierarchy_guide, subsample=torch.tensor([7, 2, 5])
    ),
    "auto-normal": lambda: (hierarchy, AutoNormal(hierarchy)),
    "auto-normal-subsampled": lambda: auto_minibatches(AutoNormal),
    "auto-delta": lambda: (hierarchy, AutoDelta(hierarchy)),
    "auto-diagonal": lambda: (hierarchy, AutoDiagonalNormal(hierarchy)),
    "auto-multivariate": lambda: (hierarchy, AutoMultivariateNormal(hierarchy)),
    "auto-low-rank": lambda: (hierarchy, AutoLowRankMultivariateNormal(hierarchy)),
    "auto-iaf": lambda: (hierarchy, AutoIAFNormal(hierarchy, hidden_dim=[20])),
    "auto-structured": lambda: (hierarchy, AutoStructured(hierarchy)),
    "auto-messenger": lambda: (hierarchy, AutoNormalMessenger(hierarchy)),
    "auto-list": lambda: (hierarchy, listed(hierarchy)),
    "easy-guide": lambda: (hierarchy, easy(hierarchy)),
    "nested": lambda: (nested, AutoNormal(nested)),
    "crossed": lambda: (crossed, AutoNormal(crossed)),
    "two-plates": lambda: (two_plates, AutoNormal(two_plates)),
    "sequential-plate": lambda: ((lambda: turns(True)), (lambda: turns(False))),
    "chain": lambda: ((lambda: chain(True)), (lambda: chain(False))),
    "ragged": lambda: (ragged, AutoNormal(ragged)),
    "constrained": lambda: (constrained, constrained_guide),
    "constrained-auto": lambda: (constrained, AutoNormal(constrained)),
    "mixture": lambda: (mixture, mixture_guide),
    "correlated": lambda: (correlated, AutoNormal(correlated)),
    "missing": lambda: (missing, AutoNormal(missing)),
    "outside": lambda: (outside, AutoNormal(outside)),
    "flow": lambda: (deep, flow_guide),
}


def some(shift):
    """Every fifth program; the others among the slow tests."""
    return pytest.mark.parametrize(
        "name",
        [
            pytest.param(n, marks=() if (i + shift) % 5 == 0 else pytest.mark.slow)
            for i, n in enumerate(PROGRAMS)
        ],
    )


# One of each way to the weights.
families = pytest.mark.parametrize("objective", ["sgvb", "iwae", "rb", "sis", "mcem"])


def auto_minibatches(cls):
    def model():
        hierarchy(subsample_size=4)

    def create_plates():
        return pyro.plate("data", N, subsample_size=4)

    return model, cls(model, create_plates=create_plates)


@pytest.fixture
def pair(name):
    FLOW[torch.get_default_dtype()] = T.affine_coupling(2, [8])
    return PROGRAMS[name]()


def ways(mine, quick):
    """The programs of each objective, vectorised and looped: each program has a part of each."""
    marks = {True: (), False: pytest.mark.slow}
    return pytest.mark.parametrize(
        ("name", "objective", "vectorize"),
        [
            pytest.param(name, o, v, id=f"{name}-{way}-{o}", marks=marks[quick(i, j, name, o, v)])
            for v, way in ((False, "looped"), (True, "vectorized"))
            for i, name in enumerate(PROGRAMS)
            for j, o in enumerate(OBJECTIVES)
            if mine(i, j, name, o, v) and not refusal(o, name)
        ],
    )


# One objective trains every eighth program; with the slow ones three do each, one of them looped.
# Looped chains take long; coordinates/test_log_weight.py compares them with vectorised.
@ways(
    lambda i, j, name, o, v: (i + j) % 4 == 0 if v else o not in CHAINS and i % 4 == j,
    quick=lambda i, j, name, o, v: v and i % 8 == 0 and (i + j) % 8 == 0,
)
def test_program_trains(pair, objective, vectorize):
    model, guide = pair
    elbo = OBJECTIVES[objective](vectorize_particles=vectorize)
    svi = SVI(model, guide, pyro.optim.ClippedAdam({"lr": 0.05}), loss=elbo)
    assert math.isfinite(svi.step())

    def evaluate():
        pyro.set_rng_seed(0)  # the same noise before and after
        return torch.tensor([svi.evaluate_loss() for _ in range(7)]).median()

    with pyro.validation_enabled(False):
        before = evaluate()
        for _ in range(36):
            assert math.isfinite(svi.step())
        assert evaluate() < before - 0.3


def parameters():
    return [p for _, p in pyro.get_param_store().named_parameters()]


PATHWISE = ("sgvb", "iwae-reparam", "rb", "sis")
NOT_SMOOTH = ("mixture", "constrained")  # discrete draws; draws of Gamma by rejection


def is_turn(i, objective, vectorize):
    """One objective of each third program, vectorised or looped; chains vectorised."""
    turn = (PATHWISE.index(objective) - i) % 4
    return i % 3 == 1 and turn == 0 and (vectorize == bool(i % 2) or objective in CHAINS)


@ways(
    lambda i, j, name, o, v: o in PATHWISE and name not in NOT_SMOOTH and (v or o not in CHAINS),
    quick=lambda i, j, name, o, v: is_turn(i, o, v),
)
def test_the_gradient_is_the_slope_at_the_same_draws(pair, objective, vectorize):
    model, guide = pair
    elbo = OBJECTIVES[objective](vectorize_particles=vectorize)
    if objective in CHAINS:
        elbo.eval()  # the step size stays
    elbo.loss(model, guide)  # AutoGuides draw their initial values here
    pyro.set_rng_seed(0)
    elbo.loss_and_grads(model, guide)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters()]
    square = sum(float((g**2).sum()) for g in grads)
    assert square > 1e-3
    ends = []
    step = 1e-5 / square**0.5
    with pyro.validation_enabled(False):
        for move in (step, -2 * step):
            for p, g in zip(parameters(), grads, strict=True):
                p.data.add_(g, alpha=move)
            pyro.set_rng_seed(0)
            ends.append(elbo.loss(model, guide))
    assert math.isclose((ends[0] - ends[1]) / (2 * step), square, rel_tol=1e-4)


@pytest.mark.parametrize(
    ("name", "objective"), [(n, o) for n in PROGRAMS for o in CHAINS if refusal(o, n)]
)
def test_chains_refuse_programs_that_they_cannot_move(pair, name, objective):
    elbo = OBJECTIVES[objective]()
    with pytest.raises(ValueError, match=refusal(objective, name)):
        elbo.loss_and_grads(*pair)


@some(0)
def test_the_elbo_of_all_particles_at_once_is_that_of_plain_traces(pair, name, monkeypatch):
    """Of Pyro's own densities at the values of each particle."""
    model, guide = pair
    elbo = TraceSGVB_ELBO(3, analytic_kl=False, vectorize_particles=True)
    elbo.loss(model, guide)
    if name in ("ragged", "missing"):  # entries that only the model masks count with their prior
        nodes = poutine.trace(guide).get_trace().nodes.values()
        latents = [s["name"] for s in nodes if s["type"] == "sample" and not site_is_subsample(s)]
        model = with_priors(model, dict.fromkeys(latents))
    runs = []
    draw = elbo.sampler.independent

    def recorded(*args, **options):
        runs[:] = draw(*args, **options)
        return list(runs)

    monkeypatch.setattr(elbo.sampler, "independent", recorded)
    loss = elbo.loss(model, guide)
    (run,) = runs
    totals = []
    for k in range(3):
        of_model, of_guide = plain_traces(model, guide, (), values_of(run, run.subsamples, k))
        totals.append((of_model.log_prob_sum() - of_guide.log_prob_sum()).item())
    assert math.isclose(-loss, sum(totals) / 3, rel_tol=1e-8)
    assert name == "auto-delta" or len(set(totals)) == 3


@some(1)
def test_objectives_take_a_step_and_their_bounds_add_up_to_the_loss(pair, name):
    """A quarter of the objectives, in turn."""
    model, guide = pair
    for objective in list(OBJECTIVES)[list(PROGRAMS).index(name) % 4 :: 4]:
        if refusal(objective, name):
            continue
        elbo = OBJECTIVES[objective]()
        assert math.isfinite(elbo.loss_and_grads(model, guide))
        grads = [p.grad for p in parameters() if p.grad is not None]
        assert all(torch.isfinite(g).all() for g in grads)
        assert any((g != 0).any() for g in grads)
        for p in parameters():
            p.grad = None
        pyro.set_rng_seed(0)
        loss = elbo.loss(model, guide)
        pyro.set_rng_seed(0)
        bounds = elbo.bounds(model, guide)
        assert math.isclose(bounds.total, -loss, rel_tol=1e-9, abs_tol=1e-9)
        assert torch.isfinite(bounds.per_datum).all()


@families
def test_a_messenger_guide_counts_global_sites_of_the_model_once(objective):
    def model(factor):
        pyro.sample("a", dist.Normal(0.0, 1.0))
        pyro.factor("f", torch.tensor(factor))
        with pyro.plate("data", 3):
            pyro.sample("z", dist.Normal(0.0, 1.0))

    guide = AutoNormalMessenger(model)
    elbo = OBJECTIVES[objective](vectorize_particles=True)
    elbo.loss(model, guide, 0.0)
    losses = []
    for factor in (4.0, 5.0):
        pyro.set_rng_seed(0)
        losses.append(elbo.loss(model, guide, factor))
    assert math.isclose(losses[0] - losses[1], 1.0, rel_tol=1e-6)


@families
def test_a_messenger_guide_does_not_hide_averages_over_particles(objective):
    def model():
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z.mean(), 1.0), obs=torch.zeros(3))

    with pytest.raises(RuntimeError, match="vectorize_particles=False"):
        OBJECTIVES[objective](vectorize_particles=True).loss(model, AutoNormalMessenger(model))


@pytest.mark.usefixtures("leading_dims_only")
@families
def test_data_computed_from_a_latent(objective):
    def model(average=False):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(1.0, 0.5), obs=z.mean() if average else z)

    def guide(average=False):
        pyro.sample("z", dist.Normal(0.3, 0.5))

    count = 15
    looped, vectorized = (
        torch.tensor([elbo.loss(model, guide) for _ in range(count)])
        for elbo in (OBJECTIVES[objective](vectorize_particles=v) for v in (False, True))
    )
    error = ((looped.var() + vectorized.var()) / count).sqrt()
    assert abs(looped.mean() - vectorized.mean()) < 4.5 * error
    with pytest.raises(RuntimeError, match="vectorize_particles=False"):
        OBJECTIVES[objective](vectorize_particles=True).loss(model, guide, average=True)


@families
def test_programs_may_differentiate(objective):
    """A guide that takes a Newton step is the one that knows where the step leads."""
    x = torch.tensor([0.0, 1.0, 3.0])

    def model(by_autograd):
        loc = pyro.sample("loc", dist.Normal(0.0, 10.0))
        with pyro.plate("data", 3):
            pyro.sample("x", dist.Normal(loc, pyro.param("scale", torch.tensor(1.5))), obs=x)

    def guide(by_autograd):
        scale = pyro.param("scale", torch.tensor(1.5))
        mode = x.sum() / scale**2 / (0.01 + 3 / scale**2)
        if by_autograd:
            z = torch.zeros((), requires_grad=True)
            log_p = dist.Normal(0.0, 10.0).log_prob(z) + dist.Normal(z, scale).log_prob(x).sum()
            (slope,) = torch.autograd.grad(log_p, z, create_graph=True)
            (curvature,) = torch.autograd.grad(slope, z, create_graph=True)
            mode = z.detach() - slope / curvature
        pyro.sample("loc", dist.Normal(mode, pyro.param("width", torch.tensor(0.8))))

    result = []
    for by_autograd in (False, True):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        loss = OBJECTIVES[objective]().loss_and_grads(model, guide, by_autograd)
        result.append([loss, *(pyro.param(n).grad.item() for n in ("scale", "width"))])
    assert result[0] == pytest.approx(result[1], rel=1e-6)
