"""Discrete sites that the guide draws, under chains: each of their slots has chains of its own."""

import contextlib
import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_mcvae import (
    MALA,
    REBAR,
    RELAX,
    ULA,
    IndependentDraw,
    LeaveOneOut,
    RandomWalk,
    SummedMean,
    TraceAIS_ELBO,
    TraceRaoBlackwell_ELBO,
    TraceSIS_ELBO,
    UnderdampedLangevin,
)
from pyro_mcvae.chains.kernels import Kernel, Proposal
from tests.elbos import discrete_programs
from tests.elbos.chain_gradients import AcceptPaths, assert_slopes, bound, gradients, parameters_of
from tests.elbos.discrete_programs import take_gradients
from tests.elbos.slot_programs import (
    PROGRAMS,
    data,
    labels_evidence,
    labels_guide,
    labels_model,
    labels_posterior,
)
from tests.estimates import assert_mean
from tests.params import in_turn

ALL = math.inf
known = pytest.mark.parametrize("name", [n for n, p in PROGRAMS.items() if p.evidence])
# Draws of a Gamma are made by rejection, and are no smooth function of anything.
SMOOTH = [n for n in PROGRAMS if n != "gamma"]


class Still(Kernel):
    """Moves nothing."""

    needs_gradient = False

    def propose(self, state, target):
        return Proposal(state, torch.zeros_like(state.log_weight))


def test_chains_that_do_not_move_are_the_rao_blackwellized_elbo():
    """At the same draws: values and gradients."""
    program, result = PROGRAMS["labels"], []
    for elbo in (TraceRaoBlackwell_ELBO(ALL), TraceSIS_ELBO(2, Still(0.1), num_categories=ALL)):
        elbo.loss(program.model, program.guide)
        pyro.set_rng_seed(0)
        result.append((elbo.loss_and_grads(program.model, program.guide), take_gradients()))
    (loss, grads), (again, grads_again) = result
    assert loss == pytest.approx(again)
    for key, value in grads.items():
        torch.testing.assert_close(grads_again[key], value)


BOUNDS = {
    "ula": lambda **k: TraceSIS_ELBO(2, ULA(0.1), **k),
    "momentum": lambda **k: TraceSIS_ELBO(
        2, UnderdampedLangevin(0.3, momentum=0.5), num_particles=2, coordinates="latent", **k
    ),
    "multi": lambda **k: TraceSIS_ELBO(2, ULA(0.1), num_particles=2, multi_sample=True, **k),
}


@pytest.mark.parametrize(
    ("name", "chain", "vectorize"),
    [
        pytest.param(
            n,
            c,
            v,
            marks=()
            if (i + j) % 3 == 0 and v == (n != "labels") and (i % 2 or n == "labels")
            else pytest.mark.slow,
        )
        for i, n in enumerate(SMOOTH)
        for j, c in enumerate(BOUNDS)
        for v in (False, True)
    ],
)
def test_the_gradient_of_an_exact_sum_is_its_slope(name, chain, vectorize):
    """At frozen noise: through q(y), also where y depends on what was drawn before it."""
    program = PROGRAMS[name]
    elbo = BOUNDS[chain](num_categories=ALL, vectorize_particles=vectorize)
    elbo.eval()
    groups = [parameters_of(elbo, program)[0]]
    assert_slopes(groups, [gradients(elbo, program, groups[0])], lambda: bound(elbo, program))


@pytest.mark.parametrize(
    ("name", "multi_sample"),
    [
        ("labels", True),
        pytest.param("labels", False, marks=pytest.mark.slow),
        pytest.param("around", False, marks=pytest.mark.slow),
        pytest.param("around", True, marks=pytest.mark.slow),
    ],
)
def test_the_gradient_through_accept_bits_is_that_of_all_of_them(name, multi_sample, monkeypatch):
    class Rows(AcceptPaths):
        """Of all rows, each with bits of its own."""

        def __init__(self, elbo, program, rows):
            particles, elbo.num_particles = elbo.num_particles, rows
            super().__init__(elbo, program, 1, monkeypatch)
            elbo.num_particles = particles

    program = PROGRAMS[name]
    if name == "labels":
        program = discrete_programs.Discrete(two_labels(True), two_labels(False))
        program.parameters, program.args = PROGRAMS["labels"].parameters, ()
    elbo = TraceAIS_ELBO(
        2, MALA(0.3), num_categories=ALL, multi_sample=multi_sample, vectorize_particles=True
    ).eval()
    parameters = parameters_of(elbo, program)[0]
    paths = Rows(elbo, program, 4)
    assert_slopes([parameters], [paths.mean_gradients(parameters)], paths.mean_bound)


def two_labels(is_model):
    def run():
        param, normal = discrete_programs.param, pyro.sample
        with pyro.plate("data", 2):
            y = normal("y", dist.Bernoulli(logits=param("p" if is_model else "q", 2)))
            z = normal("z", dist.Normal(param("mu" if is_model else "nu") * y, 0.7))
            if is_model:
                normal("x", dist.Normal(z.sin() + z, 0.5), obs=data(2))

    return run


@known
@pytest.mark.parametrize("cls", [TraceSIS_ELBO, TraceAIS_ELBO], ids=["sis", "ais"])
def test_the_mean_weight_is_the_evidence(name, cls):
    program = PROGRAMS[name]
    kernel = ULA(0.05) if cls is TraceSIS_ELBO else RandomWalk(0.5)
    elbo = cls(3, kernel, num_particles=500, vectorize_particles=True)
    result = elbo.bounds(program.model, program.guide).per_datum
    evidence, record = program.evidence().detach(), elbo.last_step
    weight = record.slot_weight * (record.log_weight - evidence).exp()
    assert_mean(weight.sum(1), torch.ones_like(evidence))
    spread = (record.slot_weight * record.log_weight).sum(1).std(0) / 500**0.5
    assert (result < evidence + 4.5 * spread).all()
    assert record.effective_sample_size.shape == evidence.shape


@in_turn(options=[{"num_categories": k} for k in (0, 1, ALL)], multi_sample=[False, True])
def test_the_exact_posterior_gives_the_evidence(options, multi_sample):
    """Without noise, and without a gradient of the guide's."""
    elbo = TraceAIS_ELBO(3, MALA(0.1), multi_sample=multi_sample, **options)
    evidence = labels_evidence()
    result = elbo.bounds(labels_model, labels_posterior).per_datum
    torch.testing.assert_close(result, evidence)
    elbo = TraceSIS_ELBO(1, Still(0.1), multi_sample=multi_sample, **options)
    torch.testing.assert_close(elbo.bounds(labels_model, labels_posterior).per_datum, evidence)


ESTIMATORS = {
    "k0-n2": {"num_categories": 0, "num_samples": 2},
    "k1": {},
    "budget": {"budget": 2},
    "plus": {"num_categories": 0, "baseline": IndependentDraw()},
    "loo": {"num_samples": 2, "baseline": LeaveOneOut()},
    "summed": {"baseline": SummedMean()},
}


@pytest.mark.parametrize(
    ("name", "estimator"),
    [
        pytest.param(n, e, marks=() if i == j == 3 else pytest.mark.slow)
        for i, n in enumerate(("labels", "around", "nested", "apart", "gamma", "subsampled"))
        for j, e in enumerate(ESTIMATORS)
    ],
)
def test_sampled_slots_have_the_mean_of_the_exact_sum(name, estimator):
    """Losses, and gradients with respect to all parameters."""
    program, means = PROGRAMS[name], []
    for options in (ESTIMATORS[estimator], {"num_categories": ALL}):
        elbo = TraceSIS_ELBO(1, ULA(0.02), num_particles=60, vectorize_particles=True, **options)
        runs = []
        for _ in range(8):
            loss = elbo.loss_and_grads(program.model, program.guide)
            grads = [g.flatten() for g in take_gradients().values()]
            runs.append(torch.cat([torch.tensor([loss]), *grads]))
        means.append((torch.stack(runs).mean(0), torch.stack(runs).var(0) / len(runs)))
    (result, variance), (exact, variance_exact) = means
    error = (variance + variance_exact).sqrt()
    assert ((result - exact).abs() < 5.5 * error + 1e-9).all(), (result, exact, error)


def test_observed_labels_leave_no_slots():
    """One pair of programs for data with and without labels."""
    elbo = TraceSIS_ELBO(2, ULA(0.1), num_categories=ALL)
    x, y = data(3), torch.tensor([0, 2, 1])
    for _ in range(2):
        elbo.loss_and_grads(labels_model, labels_guide, x)
        assert elbo.last_step.slot_weight.shape == (1, 3, 3)
        elbo.loss_and_grads(labels_model, labels_guide, x, y)
        assert elbo.last_step.slot_weight is None
        assert elbo.last_step.log_weight.shape == (1, 3)


def test_the_reweighted_gradient_weighs_slots_by_their_ends():
    """theta by p(y | x) as the chains estimate it; phi by the Rao-Blackwellized ELBO."""
    program, model = PROGRAMS["labels"], ("mu", "prior")
    grads = []
    for elbo in (
        TraceRaoBlackwell_ELBO(ALL),
        TraceSIS_ELBO(2, Still(0.1), gradient_estimator="reweighted", num_categories=ALL),
    ):
        elbo.loss(program.model, program.guide)
        pyro.set_rng_seed(0)
        elbo.loss_and_grads(program.model, program.guide)
        grads.append(take_gradients())
    for key in grads[0].keys() - set(model):
        torch.testing.assert_close(grads[0][key], grads[1][key])
    record = elbo.last_step
    weight = (record.log_weight + record.slot_weight.log()).softmax(1).sum((0, 2))
    prior = pyro.param("prior").detach().softmax(-1)
    torch.testing.assert_close(-grads[1]["prior"], weight - 3 * prior)


def test_discrete_sites_that_all_data_share_are_told(caplog):
    program = discrete_programs.PROGRAMS["subsampled"]
    elbo = TraceSIS_ELBO(1, ULA(0.1))
    for _ in range(2):
        elbo.loss(program.model, program.guide)
    assert [r.getMessage() for r in caplog.records if "'c' is shared by all" in r.getMessage()] == [
        "guide site 'c' is shared by all data, so it has no slots: it is drawn once a step, with "
        "the score function as its gradient. TraceRaoBlackwell_ELBO sums it if the programs run "
        "with several of its values at once"
    ]


def wide(is_model):
    with pyro.plate("data", 2):
        total = 0.0
        for i in range(15):
            total = total + pyro.sample(f"y{i}", dist.Bernoulli(0.3))
        if is_model:
            pyro.sample("x", dist.Normal(total, 1.0), obs=data(2))


def whole(is_model):
    y = pyro.sample("y", dist.Bernoulli(0.3), infer={"mcvae": {"num_samples": 2}})
    with pyro.plate("data", 2, subsample=torch.tensor([0])) as index:
        z = pyro.sample("z", dist.Normal(y, 1.0))
        if is_model:
            pyro.sample("x", dist.Normal(z, 1.0), obs=data(2)[index])


def observing(is_model):
    with pyro.plate("data", 3):
        y = pyro.sample("y", dist.Bernoulli(0.3))
        if is_model:
            pyro.sample("x", dist.Normal(y, 1.0), obs=data(3))
        else:
            pyro.sample("t", dist.Normal(y, 1.0), obs=data(3), infer={"is_auxiliary": True})


def relaxing():
    return RELAX(torch.nn.Linear(3, 1))


@pytest.mark.parametrize(
    ("run", "options", "message"),
    [
        (wide, {}, "site 'y13' would take 16384 slots of each datum"),
        (observing, {}, "the guide observes site 't', whose density"),
        (whole, {}, "site 'y' is shared by all data, so it is drawn once a step"),
        (None, {"baseline": relaxing()}, "RELAX relaxes guide site 'y', whose slots"),
        (None, {"baseline": REBAR(lambda y, x: y)}, "REBAR relaxes guide site 'y', whose slots"),
        (None, {"num_samples": 0}, "site 'y' has 3 values, of which num_categories=1 are summed"),
    ],
)
def test_what_has_no_slots_is_refused_by_name(run, options, message):
    elbo = TraceSIS_ELBO(2, ULA(0.1), **options)
    model, guide = labels_model, labels_guide
    if run is not None:
        model, guide = (lambda: run(True)), (lambda: run(False))
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            elbo.loss_and_grads(model, guide)


def test_elements_that_share_a_weight_have_too_many_values_together_and_are_drawn_on_request():
    def model(infer):
        return program(torch.full((6,), 1 / 6), {})

    def guide(infer):
        return program(torch.arange(1.0, 7.0) / 21, infer)

    def program(p, infer):
        with pyro.plate("groups", 3):
            pyro.sample("a", dist.Bernoulli(0.5))
            with pyro.plate("members", 5):
                pyro.sample("b", dist.Categorical(p), infer=infer)

    elbo = TraceSIS_ELBO(2, num_particles=20)
    together = r"site 'b' .*5 elements that share a weight: together 6\^5.*'enumerate'.*'mcvae'"
    with pytest.raises(ValueError, match=together):
        elbo.loss(model, guide, {"enumerate": "parallel"})
    few = {"enumerate": "parallel", "mcvae": {"num_categories": 1, "num_samples": 1}}
    q = torch.arange(1.0, 7.0) / 21
    losses = torch.tensor([elbo.loss(model, guide, few) for _ in range(12)])
    assert_mean(losses, 15 * (q * (6 * q).log()).sum())


@pytest.mark.parametrize("loss", [TraceRaoBlackwell_ELBO, TraceSIS_ELBO])
def test_a_mask_inside_of_an_event_takes_no_density_out_of_the_draw(loss):
    """What is masked counts in no weight, and steers the model all the same."""
    mask, x = torch.tensor([[True, True], [False, True]]), torch.tensor([0.5, 2.0])
    logits, elbo = torch.tensor([[0.3, -0.2], [0.4, 0.1]]), loss(num_categories=ALL)

    def draw(fn):
        return pyro.sample("b", fn.mask(mask).to_event(1)).sum(-1)

    def model():
        with pyro.plate("data", 2):
            pyro.sample("x", dist.Normal(draw(dist.Bernoulli(torch.full((2, 2), 0.3))), 1), obs=x)

    def guide():
        with pyro.plate("data", 2):
            draw(dist.Bernoulli(logits=pyro.param("logits", logits)))

    elbo.loss_and_grads(model, guide)
    exact, free = 0.0, logits.detach().clone().requires_grad_()
    for b in torch.cartesian_prod(torch.arange(2.0), torch.arange(2.0)):
        log_q, log_p = dist.Bernoulli(logits=free).log_prob(b), dist.Bernoulli(0.3).log_prob(b)
        log_weight = dist.Normal(b.sum(), 1).log_prob(x) + (mask * (log_p - log_q)).sum(-1)
        exact = exact - (log_q.sum(-1).exp() * log_weight).sum()
    exact.backward()
    torch.testing.assert_close(pyro.param("logits").unconstrained().grad, free.grad)


@pytest.mark.parametrize(
    ("cls", "kernel", "scale", "mask"),
    [(TraceSIS_ELBO, ULA(0.05), 0.4, True), (TraceAIS_ELBO, MALA(0.3), 1.0, False)],
    ids=["sis-scaled", "ais-masked"],
)
def test_what_weighs_less_was_drawn_all_the_same(cls, kernel, scale, mask):
    r"""
    Chains begin at the density of the draws, for any scale and mask of their weight: the
    mean of :math:`\exp W` is that of the weight over the guide's draws.
    """
    x, slope = torch.full((6000,), 1.3), torch.tensor([2.5, -1.0, 0.5])
    prior, labels = dist.Normal(0.0, 1.0), dist.Categorical(logits=torch.tensor([0.5, 0.0, -0.3]))
    own = dist.Normal(0.2, 1.2)

    def draw(fn, label):
        z = pyro.sample("z", fn)
        with pyro.poutine.mask(mask=mask):
            return z + pyro.sample("y", label(z))

    def model():
        with pyro.plate("data", len(x)), pyro.poutine.scale(scale=scale):
            pyro.sample("x", dist.Normal(draw(prior, lambda z: labels), 0.7), obs=x)

    def label(z):
        return dist.Categorical(logits=z.unsqueeze(-1) * slope)

    def guide():
        with pyro.plate("data", len(x)), pyro.poutine.scale(scale=scale):
            draw(own, label)

    z, y = torch.linspace(-12, 12, 2401), torch.arange(3).unsqueeze(-1)
    log_y, log_q = label(z).log_prob(y), own.log_prob(z)
    log_w = prior.log_prob(z) - log_q + dist.Normal(z + y, 0.7).log_prob(x[0])
    log_w = log_w + mask * (labels.log_prob(y) - log_y)
    exact = (log_q + log_y + scale * log_w).exp().sum() * (z[1] - z[0])
    elbo = cls(4, kernel, num_particles=2, vectorize_particles=True)
    elbo.bounds(model, guide)
    record = elbo.last_step
    weight = (record.slot_weight * record.log_weight.exp()).sum(1)
    assert_mean(weight.flatten() / exact, torch.tensor(1.0))


@pytest.mark.parametrize(
    "elbo",
    [
        lambda **k: TraceSIS_ELBO(2, ULA(0.05), **k),
        lambda **k: TraceAIS_ELBO(2, MALA(0.3), **k),
    ],
    ids=["sis", "ais"],
)
@pytest.mark.parametrize("num_categories", [1, pytest.param(ALL, marks=pytest.mark.slow)])
def test_values_that_cannot_be_leave_no_trace(elbo, num_categories):
    """Of probability 0 under both programs: as if there were no such values, not inf - inf."""
    means = torch.tensor([-1.0, 1.0, 7.0])

    def gradient(categories, count):
        allowed = torch.tensor([0.0, 0.0, -math.inf])[:categories]

        def model():
            with pyro.plate("data", count):
                y = pyro.sample("y", dist.Categorical(logits=allowed))
                z = pyro.sample("z", dist.Normal(means[y], 1.0))
                pyro.sample("x", dist.Normal(z, 1.0), obs=torch.tensor(0.3))

        def guide():
            logits = pyro.param("logits", torch.tensor([0.2, -0.3]).expand(count, 2))
            slope = pyro.param("slope", torch.full((count,), 0.5))
            padded = torch.cat([logits, logits.new_zeros(count, 1)], -1)[:, :categories]
            with pyro.plate("data", count):
                y = pyro.sample("y", dist.Categorical(logits=padded + allowed))
                pyro.sample("z", dist.Normal(slope * means[y], 1.0))

        pyro.clear_param_store()
        loss = elbo(num_categories=num_categories).loss_and_grads(model, guide)
        assert math.isfinite(loss)
        result = dict(pyro.get_param_store().named_parameters())
        return torch.cat([result["logits"].grad, result["slope"].grad.unsqueeze(-1)], -1)

    with_, without = gradient(3, 4000), gradient(2, 4000)
    error = (with_.var(0) + without.var(0)).sqrt() / 4000**0.5
    assert ((with_.mean(0) - without.mean(0)).abs() < 4.5 * error).all()


@pytest.mark.parametrize(
    ("make", "plated"),
    [
        (TraceRaoBlackwell_ELBO, False),
        (lambda: TraceRaoBlackwell_ELBO(ALL), True),
        (lambda: TraceRaoBlackwell_ELBO(0, 2), True),
        (lambda: TraceSIS_ELBO(2, num_categories=ALL), True),
        (lambda: TraceSIS_ELBO(2, num_categories=ALL), False),
    ],
)
def test_discrete_sites_that_come_and_go_are_named(make, plated):
    """A stop bit decides whether another bit is drawn, as in grammars."""

    def program(is_model):
        with pyro.plate("data", 1) if plated else contextlib.nullcontext():
            total, more = 0.0, True
            for t in range(3):
                if not more:
                    break
                stop = pyro.sample(f"stop_{t}", dist.Bernoulli(0.4 if is_model else 0.5))
                more, total = bool(stop == 0), total + stop
            if is_model:
                pyro.sample("x", dist.Normal(total, 1.0), obs=torch.tensor(0.5))

    elbo = make()

    def steps():
        for _ in range(10):
            elbo.loss(lambda: program(True), lambda: program(False))

    with pytest.raises(
        ValueError, match=r"guide site 'stop_[12]' is drawn (for|in) some .*draw it"
    ):
        steps()


@pytest.mark.parametrize("make", [TraceSIS_ELBO, TraceAIS_ELBO])
def test_calls_with_other_slots_in_turn_run_once_each(make):
    """Running statistics count each step once, and a seed gives the draws of a new objective."""
    norm, x = torch.nn.BatchNorm1d(1), torch.arange(4.0)

    def model(labels):
        with pyro.plate("data", 4):
            y = pyro.sample("y", dist.Bernoulli(0.3)) if labels else torch.tensor(0.0)
            z = pyro.sample("z", dist.Normal(y, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def guide(labels):
        loc = norm(x.unsqueeze(-1)).squeeze(-1)
        with pyro.plate("data", 4):
            if labels:
                pyro.sample("y", dist.Bernoulli(logits=loc))
            pyro.sample("z", dist.Normal(loc, 1.0))

    elbo = make(2, UnderdampedLangevin(0.2) if make is TraceSIS_ELBO else MALA(0.1))
    for step, labels in enumerate([False, False, True, True, False, True]):
        losses = []
        for objective in elbo, make(2, elbo.kernel):
            pyro.set_rng_seed(step)
            losses.append(objective.loss(model, guide, labels))
        assert losses[0] == pytest.approx(losses[1])
        assert norm.num_batches_tracked == 2 * (step + 1)


@pytest.mark.parametrize("before", [1, 2])
def test_slots_in_dims_notice_a_flag_that_couples_data_at_once(before):
    """Data that depend on each other's discrete sites have no sum for each site alone."""
    norm, x = torch.nn.BatchNorm1d(1), torch.arange(4.0)

    def model(coupled):
        with pyro.plate("data", 4):
            y = pyro.sample("y", dist.Bernoulli(0.3))
            loc = y + y.mean(-1, keepdim=True) if coupled else y
            pyro.sample("x", dist.Normal(loc, 1.0), obs=x)

    def guide(coupled):
        logits = norm(x.unsqueeze(-1)).squeeze(-1)
        with pyro.plate("data", 4):
            pyro.sample("y", dist.Bernoulli(logits=logits))

    elbo = TraceRaoBlackwell_ELBO(2)
    for _ in range(before):
        elbo.loss(model, guide, False)
    for coupled in (True, False):
        losses = []
        for objective in elbo, TraceRaoBlackwell_ELBO(2):
            pyro.set_rng_seed(0)
            losses.append(objective.loss(model, guide, coupled))
        assert losses[0] == pytest.approx(losses[1])
    assert norm.num_batches_tracked == before + 4
