"""Losses compared: copies that know nothing of each other, and one estimator for all."""

from argparse import Namespace
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam
from torch import nn

from pyro_mcvae import (
    CompiledELBO,
    TraceAIS_ELBO,
    TraceIWAE_ELBO,
    TraceSGVB_ELBO,
    compare,
    log_evidence,
)
from pyro_mcvae.elbos.base import Estimate
from pyro_mcvae.evaluation.compare import Comparison, TrainedCopy
from tests.cases import every
from tests.models import ConjugateGaussian

LOSSES = {
    "ELBO": Trace_ELBO(),
    "AIS": TraceAIS_ELBO(1, num_particles=2),
}
SHORT = {"num_steps": 3, "num_checks": 1, "check_particles": 5, "num_particles": 40, "seed": 1}


def functions():
    exact = ConjugateGaussian(N=6)
    return exact.model, exact.guide, ()


class Networks(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.encoder = nn.Linear(3, 2)

    def model(self, x):
        pyro.module("decoder", self.decoder)
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(x.new_zeros(2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(self.decoder(z), 1.0).to_event(1), obs=x)

    def guide(self, x):
        pyro.module("encoder", self.encoder)
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(self.encoder(x), 1.0).to_event(1))


def networks():
    both = Networks()
    return both.model, both.guide, (torch.randn(5, 3),)


def run(programs, losses, **options):
    model, guide, args = programs
    options = {**SHORT, **options}
    return compare(model, guide, *args, losses=losses, optim=Adam({"lr": 0.1}), **options)


@pytest.mark.parametrize("make", every(2, [functions, networks]))
def test_copies_know_nothing_of_each_other(make):
    """Each has the steps that it has alone, and the judgement of the values that it leaves."""
    programs = make()
    losses = dict(LOSSES)
    if make is networks:  # particles would share a batch's statistics
        losses = {"ELBO": Trace_ELBO(), "SGVB": TraceSGVB_ELBO()}
    result = run(programs, losses)
    name, loss = list(losses.items())[-1]
    alone = run(programs, {name: loss})
    assert alone[name].bounds == result[name].bounds
    assert torch.equal(alone[name].evidence.log_evidence, result[name].evidence.log_evidence)
    for name in (*losses, next(iter(losses))):
        result.use(name)
        model, guide, args = programs
        evaluated = log_evidence(model, guide, *args, num_particles=40, seed=1)
        assert torch.equal(evaluated.log_evidence, result[name].evidence.log_evidence)
    assert len({tuple(f.bounds) for f in result.values()}) == len(losses)


@pytest.mark.slow
def test_programs_begin_again_where_they_were():
    programs = networks()
    run(programs, {"ELBO": Trace_ELBO()})
    before = {n: t.clone() for n, t in programs[0].__self__.state_dict().items()}
    generator = torch.get_rng_state()
    run(programs, {"ELBO": Trace_ELBO(), "SGVB": TraceSGVB_ELBO()})
    for name, tensor in programs[0].__self__.state_dict().items():
        assert torch.equal(before[name], tensor), name
    assert torch.equal(generator, torch.get_rng_state())


@pytest.mark.parametrize("subsample_size", [None, 4])
def test_bounds_are_per_weight(subsample_size):
    """The exact guide's weights are the evidences of the data in the minibatch."""
    exact = ConjugateGaussian(N=20, subsample_size=subsample_size)
    exact.set_guide("exact")
    result = compare(
        exact.model,
        exact.guide,
        losses={"IWAE": TraceIWAE_ELBO(2)},
        optim=Adam({"lr": 0.0}),
        **{**SHORT, "num_steps": 10},
    )["IWAE"]
    evidence = exact.log_evidence_per_datum()
    if subsample_size is None:
        assert result.bounds == pytest.approx([float(evidence.mean())] * 10)
    else:
        assert float(evidence.min()) < min(result.bounds) < max(result.bounds) < evidence.max()
        assert abs(result.last_bound) < 5


@pytest.mark.parametrize("form", [int, float, torch.tensor, lambda n: Namespace(size=n)])
def test_bounds_are_per_weight_of_their_own_batch(form):
    def size_of(n):
        return int(n.size if isinstance(n, Namespace) else n)

    def model(x, n):
        with pyro.plate("data", size_of(n), subsample_size=len(x)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def guide(x, n):
        with pyro.plate("data", size_of(n), subsample_size=len(x)):
            pyro.sample("z", dist.Normal(x / 2, pyro.param("s", torch.tensor(0.7))))

    x = torch.zeros(4)
    result = compare(
        model,
        guide,
        x,
        form(4),
        losses={"elbo": Trace_ELBO()},
        optim=Adam({"lr": 1e-6}),
        num_steps=2,
        num_checks=1,
        check_particles=2,
        num_particles=2,
        batches=[(x, form(4)), (x, form(4000))],
    )
    assert all(-1.5 < bound < -1.1 for bound in result["elbo"].bounds)


def test_it_trains_on_batches_and_judges_what_it_is_given():
    both = Networks()
    both.decoder = nn.Linear(2, 3)
    data, seen = torch.randn(10, 3), []

    def batches():
        seen.append("epoch")
        return iter([(data[:6], "labels"), (data[6:], "labels")])

    options = {"batches": batches, "to_args": lambda batch: batch[:1]}
    result = run((both.model, both.guide, (data[:3],)), {"ELBO": Trace_ELBO()}, **options)
    assert result["ELBO"].evidence.log_evidence.shape == (3,)
    assert len(seen) == 1 + 2  # the first batch, and a pass and a half over two batches
    with pytest.raises(ValueError, match="got an iterator, which is used up after one pass"):
        run((both.model, both.guide, (data,)), {"ELBO": Trace_ELBO()}, batches=iter([data]))
    with pytest.raises(ValueError, match="batches is empty"):
        run((both.model, both.guide, (data,)), {"ELBO": Trace_ELBO()}, batches=[])


@pytest.mark.slow
def test_an_epoch_is_a_pass_over_the_batches():
    both, data = Networks(), torch.randn(10, 3)
    both.decoder = nn.Linear(2, 3)
    programs = both.model, both.guide, (data[:3],)
    epochs = {"num_steps": None, "num_epochs": 2, "num_checks": 1}
    ways = [data.split(4), lambda: (data[torch.randperm(10)][:4] for _ in range(3))]
    result = [run(programs, {"ELBO": Trace_ELBO()}, batches=way, **epochs)["ELBO"] for way in ways]
    assert [len(f.bounds) for f in result] == [6, 6]
    assert [len(f.times) for f in result] == [6, 6]
    assert result[0].seconds == pytest.approx(sum(result[0].times))
    # Counting the batches takes no random numbers from those that train.
    again = run(programs, {"ELBO": Trace_ELBO()}, batches=ways[1], num_steps=6)["ELBO"]
    assert again.bounds == result[1].bounds
    (alone,) = run(programs, {"ELBO": Trace_ELBO()}, **epochs).values()
    assert len(alone.bounds) == 2


class Fails(TraceSGVB_ELBO):
    """At its third step, the warm-up's not counted, with a gradient left behind."""

    steps = 0

    def loss_and_grads(self, *args, **kwargs):
        result = super().loss_and_grads(*args, **kwargs)
        self.steps += 1
        if self.steps == 3:
            raise ValueError("the loss is not finite\nat all")
        return result


@pytest.mark.slow
def test_what_fails_on_the_way_is_said_and_leaves_the_others_alone():
    programs = functions()
    steps = {"num_steps": 4, "num_checks": 4}
    result = run(programs, {"bad": Fails(), "ELBO": Trace_ELBO()}, **steps)
    assert result["bad"].failed == "step 3: the loss is not finite"
    assert len(result["bad"].bounds) == 2
    assert result["ELBO"].bounds == run(programs, {"ELBO": Trace_ELBO()}, **steps)["ELBO"].bounds
    assert result.best == ["ELBO"]
    assert "bad stopped at step 3: the loss is not finite" in str(result)


def test_time_is_equal():
    result = run(functions(), LOSSES, num_steps=None, seconds=0.3)
    for copy in result.values():
        slowest = copy.seconds / len(copy.bounds)
        assert 0.3 <= copy.seconds < 0.3 + 20 * slowest
    assert len({len(copy.bounds) for copy in result.values()}) > 1


def evaluated(evidence, error, k, learns, sizes=None):
    """A comparison by numbers: names, evidences per datum, k-hats, effective sample sizes."""
    template = log_evidence(*functions()[:2], num_particles=30)
    result = {}
    for name in evidence:
        one = replace(
            template,
            log_evidence=torch.tensor(evidence[name]),
            standard_error=torch.full((3,), error),
            pareto_k=torch.full((3,), k.get(name, 0.3)),
            effective_sample_size=torch.full((3,), (sizes or {"a": 20.0}).get(name, 10.0)),
        )
        result[name] = TrainedCopy([-1.0], 1.0, [1.0], {1: (1.0, one)}, one, one)
    return Comparison(result, learns)


EVIDENCES = {"a": [1.0, 5.0, 3.0], "b": [1.5, 5.6, 3.4], "c": [1.6, 5.4, 3.5]}


def test_the_verdict():
    result = evaluated(EVIDENCES, 0.01, {}, learns=True)
    # Paired: the data differ by more than the losses do.
    assert result.gain("b", "a") == pytest.approx((0.5, 0.1 / 3**0.5))
    assert result.best == ["b", "c"]
    assert "b and c do not differ significantly by log evidence" in result.verdict
    assert "Pareto" not in result.verdict
    doubtful = evaluated(EVIDENCES, 0.01, {"a": 0.9}, learns=True)
    assert "The evidence of a is too low" in doubtful.verdict
    assert "so the order may be wrong; chains (schedule=10, or more)" in doubtful.verdict
    same = evaluated(EVIDENCES, 0.01, {}, learns=False)
    assert same.best == ["a"]


def test_it_prints():
    result = run(functions(), {"ELBO": Trace_ELBO(), "IWAE": TraceIWAE_ELBO(3)})
    text = str(result)
    for part in (
        "own bound, training",
        "columns from ELBO on: evaluated data",
        "over ELBO",
        "k > 0.7",
        "ESS",
        "another seed",
    ):
        assert part in text
    assert "and k > 0.7: of 40 draws of the guide" in " ".join(text.split())
    with pytest.raises(ValueError, match="'SIS' was not compared: there are ELBO, IWAE"):
        result.use("SIS")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"losses": [Trace_ELBO()]}, "losses must be a dict of losses by name"),
        ({"losses": {"a": Trace_ELBO}}, r"losses\['a'\] must be a loss that SVI takes"),
        ({"optim": torch.optim.Adam}, "optim must be one of pyro.optim"),
        ({"optim": {"b": Adam({})}}, "a dict of them by name; for 'a' got None"),
        ({"seconds": 3.0, "num_steps": 5}, "pass seconds=3.0 or num_steps=5"),
        ({"num_steps": 5, "num_epochs": 2}, "pass num_steps=5 or num_epochs=2"),
        ({"num_steps": None, "num_epochs": 0}, "num_epochs must be an int of at least 1, got 0"),
        ({"seconds": 0.0, "num_steps": None}, "seconds must be a positive number"),
        ({"num_checks": 0}, "num_checks must be an int of at least 1"),
    ],
)
def test_arguments(given, message):
    model, guide, args = functions()
    options = {**SHORT, "losses": {"a": Trace_ELBO()}, "optim": Adam({"lr": 0.1}), **given}
    with pytest.raises(ValueError, match=message):
        compare(model, guide, *args, **options)


def test_what_cannot_be_judged_is_refused_before_training():
    steps = []

    class Counted(TraceSGVB_ELBO):
        def estimate(self, programs) -> Estimate:
            steps.append(1)
            return super().estimate(programs)

    def model(x):
        with pyro.plate("data", 4, subsample=x):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z.sum(), 1.0), obs=torch.ones(()))

    def guide(x):
        with pyro.plate("data", 4, subsample=x):
            pyro.sample("z", dist.Delta(torch.zeros(len(x))))

    with pytest.raises(ValueError, match="importance sampling from a single point"):
        run((model, guide, (torch.arange(4),)), {"ELBO": Counted()})
    assert len(steps) <= 1


def test_a_few_effective_draws_evaluate_nothing():
    """Best by an effective sample size of 4, 1, 1 and 2 of 1,000 was the ELBO."""
    sizes = {"a": 4.0, "b": 1.0, "c": 2.0}
    result = evaluated(EVIDENCES, 1.0, {}, learns=False, sizes=sizes)
    assert not result.evaluated
    assert set(result.best) == set(result)
    assert "Not evaluated: too few effective draws" in result.verdict
    assert "The highest ELBO is that of" in result.verdict
    assert "± unknown" in str(result)
    learning = evaluated(EVIDENCES, 1.0, {}, learns=True, sizes=sizes)
    assert "Not evaluated" in learning.verdict
    assert "chains (schedule=10, or more)" in learning.verdict
    assert evaluated(EVIDENCES, 1.0, {}, learns=False).evaluated


def improper(x):
    loc = pyro.sample("loc", dist.ImproperUniform(dist.constraints.real, (), ()))
    with pyro.plate("data", len(x)):
        pyro.sample("x", dist.Normal(loc, 1.0), obs=x)


@pytest.mark.slow
def test_priors_that_cannot_be_drawn_from():
    x = torch.tensor([1.0, 2.0, 4.0])
    guide = AutoNormal(improper, init_loc_fn=lambda site: torch.zeros(()))
    result = run((improper, guide, (x,)), {"ELBO": Trace_ELBO()}, num_steps=200)
    exact = (
        dist.Normal(x.mean(), 1.0).log_prob(x).sum() + 0.5 * torch.tensor(2 * torch.pi / 3).log()
    )
    assert not result.learns
    evidence = result["ELBO"].evidence
    assert abs(evidence.total - exact) < 4 * evidence.total_standard_error + 0.05


def test_the_last_evaluation_is_tried_before_the_first_step():
    steps = []

    class Counted(TraceSGVB_ELBO):
        def loss_and_grads(self, *args, **kwargs):
            steps.append(1)
            return super().loss_and_grads(*args, **kwargs)

    def model():
        with pyro.plate("data", 3):
            k = pyro.sample("k", dist.Categorical(torch.ones(2)))
            pyro.sample("x", dist.Normal(k.double(), 1.0), obs=torch.zeros(3))

    def guide():
        with pyro.plate("data", 3):
            pyro.sample("k", dist.Categorical(torch.ones(3, 2)))

    with pytest.raises(ValueError, match="the guide's site 'k' is discrete"):
        run((model, guide, ()), {"ELBO": Counted()}, schedule=3)
    assert not steps


def test_each_line_is_logged_once(caplog):
    with caplog.at_level("INFO", "pyro_mcvae"):
        run(functions(), LOSSES)
    lines = [r.getMessage() for r in caplog.records]
    assert lines
    assert len(lines) == len(set(lines))


@pytest.mark.slow
def test_compiled_losses_are_recorded(caplog):
    """Isolation hides the outer handlers, so that none of them would miss the sites."""
    losses = {"ELBO": TraceSGVB_ELBO(), "replayed": CompiledELBO(TraceSGVB_ELBO(), backend="eager")}
    with caplog.at_level("INFO", "pyro_mcvae"):
        result = run(functions(), losses, num_steps=6)
    assert not [r for r in caplog.records if "runs uncompiled" in r.getMessage()]
    assert result["replayed"].bounds == result["ELBO"].bounds


@pytest.mark.slow
def test_the_plot_has_the_numbers():
    pytest.importorskip("matplotlib").use("agg")
    result = run(functions(), LOSSES)
    left, right = result.plot()
    labels = [text.get_text() for text in left.get_yticklabels()]
    assert labels == [f"{name}: {kind}" for name in LOSSES for kind in ("ELBO", "log p(x)")]
    plotted = [container.lines[0].get_xdata()[0] for container in left.containers]
    expected = [x for c in result.values() for x in (c.guide.bound.mean(), c.evidence.mean)]
    assert plotted == pytest.approx([float(x) for x in expected])
    for container, name in zip(right.containers, LOSSES, strict=True):
        values = [float(evidence.mean) for _, evidence in result[name].curve.values()]
        assert container.lines[0].get_ydata() == pytest.approx(values)
    styles = [
        (line.get_color(), line.get_marker()) for line, *_ in (c.lines for c in right.containers)
    ]
    assert len({color for color, _ in styles}) == len({marker for _, marker in styles}) == 2
