"""The clock of long calls: lines of progress, and what a time budget returns."""

import logging
import re
from queue import SimpleQueue

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO
from pyro.optim import Adam

from pyro_mcvae import (
    TraceIWAE_ELBO,
    compare,
    compare_models,
    log_evidence,
    refine,
    report,
    sandwich,
)
from pyro_mcvae.evaluation import clock as clock_module
from pyro_mcvae.evaluation.clock import Clock, OutOfTimeError, Stage

X = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64)


class Time:
    """A clock that advances when a model runs. What a queue of C holds is not put back."""

    def __init__(self) -> None:
        self._now: SimpleQueue[float] = SimpleQueue()
        self._now.put(0.0)

    @property
    def seconds(self) -> float:
        now = self._now.get()
        self._now.put(now)
        return now

    @seconds.setter
    def seconds(self, now: float) -> None:
        self._now.get()
        self._now.put(now)

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def time(monkeypatch):
    result = Time()
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    monkeypatch.setattr(clock_module, "now", result)
    return result


def programs(time, scale=1.2):
    """A model that takes one second in each run, and its guide."""

    def model(x):
        time.seconds += 1.0
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def guide(x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(x / 2, torch.tensor(scale)))

    return model, guide


def lines(caplog):
    return [r.getMessage() for r in caplog.records if "about" in r.getMessage()]


def test_a_line_every_ten_seconds(time, caplog):
    with Clock("report") as clock:
        stage = clock.stage("draws", 35, "draws")
        for _ in range(35):
            time.seconds += 1.0
            stage.advance()
    said = lines(caplog)
    # The first line announces 34 seconds; then one line in ten seconds.
    assert [float(re.search("([0-9]+) s left", line)[1]) for line in said] == [34, 24, 14, 4]
    assert said[0].startswith("report: draws, 1 of 35 draws after 1 s")


def test_a_slow_first_unit_is_no_prediction(time, caplog):
    with Clock("compare") as clock:
        stage = clock.stage("training", 90, "steps")
        time.seconds += 0.9
        stage.advance()
        for _ in range(89):
            time.seconds += 0.1
            stage.advance()
    assert lines(caplog) == []


def test_short_calls_and_silenced_ones_have_no_lines(time, caplog):
    for show, count in ((None, 9), (False, 100)):
        with Clock("report", show) as clock:
            stage = clock.stage("draws", count, "draws")
            for _ in range(count):
                time.seconds += 1.0
                stage.advance()
    assert lines(caplog) == []


def test_the_variable_of_tqdm_hides_lines(time, caplog, monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "1")
    with Clock("report") as clock:
        stage = clock.stage("draws", 100, "draws")
        for _ in range(100):
            time.seconds += 1.0
            stage.advance()
    assert lines(caplog) == []


def test_a_bar_has_no_lines(time, caplog, capsys):
    with Clock("report", True) as clock:
        stage = clock.stage("draws", 100, "draws")
        for _ in range(100):
            time.seconds += 1.0
            stage.advance()
    assert lines(caplog) == []
    assert "report" in capsys.readouterr().err


def test_parts_of_a_budget_end_earlier(time):
    with Clock("report", None, 10.0) as clock:
        with clock.until(0.3):
            time.seconds = 2.9
            assert not clock.expired
            with clock.until(0.9):  # not later than the part outside
                time.seconds = 3.0
                assert clock.expired
        assert not clock.expired
        time.seconds = 10.0
        assert clock.expired


@pytest.mark.parametrize("budget", [0, -1.0, float("nan"), float("inf"), "5", True])
@pytest.mark.parametrize("evaluator", [log_evidence, report, refine, sandwich])
def test_wrong_budgets(evaluator, budget, time):
    with pytest.raises(ValueError, match="time_budget must be a positive number"):
        evaluator(*programs(time), X, time_budget=budget)


def fields(evidence):
    return evidence.log_evidence, evidence.standard_error, evidence.pareto_k


def test_a_budget_returns_the_draws_until_then(time, caplog):
    """The same numbers as from as many draws without a budget."""
    whole = log_evidence(*programs(time), X, num_particles=1000, chunk_size=100, seed=0)
    model, guide = programs(time)
    begin = time.seconds
    log_evidence(model, guide, X, num_particles=100, seed=0)
    once = time.seconds - begin  # of one chunk, and of the runs before
    time.seconds = 0.0
    part = log_evidence(*programs(time), X, num_particles=1000, seed=0, time_budget=once + 2.5)
    count = part.num_particles
    assert 100 <= count < 1000
    assert count % 100 == 0
    assert f"{count} of 1000 particles" in caplog.text
    same = log_evidence(*programs(time), X, num_particles=count, chunk_size=100, seed=0)
    for value, expected in zip(fields(part), fields(same), strict=True):
        assert torch.equal(value, expected)
    # The error is that of fewer draws.
    ratio = part.standard_error / whole.standard_error
    assert bool((ratio > 0.7 * (1000 / count) ** 0.5).all())


@pytest.mark.parametrize("options", [{}, {"schedule": 3}])
def test_a_budget_that_suffices_changes_nothing(options, time):
    args = *programs(time), X
    options = {"num_particles": 50, "chunk_size": 5, "seed": 0, **options}
    free, limited = (log_evidence(*args, time_budget=b, **options) for b in (None, 1e6))
    for value, expected in zip(fields(limited), fields(free), strict=True):
        assert torch.equal(value, expected)


def test_unfinished_chains_are_an_error_that_names_them(time):
    store = pyro.get_param_store()
    before = torch.random.get_rng_state()
    for what, budget in (("warm-up of chains from the guide", 5), ("chains of 20 steps", 90)):
        time.seconds = 0.0
        message = rf"log_evidence: time_budget={budget} ended in {what}.*, after [0-9]+ of [0-9]+"
        warmup = 20 if "warm-up" in what else 1
        with pytest.raises(OutOfTimeError, match=message):
            log_evidence(*programs(time), X, schedule=20, warmup=warmup, time_budget=budget, seed=0)
    assert not len(store)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_chains_that_ended_are_returned(time, caplog):
    options = {"schedule": 4, "warmup": 1, "num_particles": 40, "chunk_size": 4, "seed": 0}
    begin = time.seconds
    whole = log_evidence(*programs(time), X, **options)
    spent = time.seconds - begin
    part = log_evidence(*programs(time), X, time_budget=spent / 2, **options)
    count = part.num_particles
    assert 4 <= count < 40
    assert f"{count} of 40 particles" in caplog.text
    same = log_evidence(*programs(time), X, **{**options, "num_particles": count})
    assert torch.equal(part.log_evidence, same.log_evidence)
    assert torch.allclose(part.acceptance, same.acceptance)
    assert whole.num_particles == 40


@pytest.mark.slow
def test_a_report_names_the_chains_that_did_not_end(time, caplog):
    model, guide = programs(time, 0.3)  # with heavy tails, so that chains run
    whole = report(model, guide, X, seed=0)
    assert whole.chains
    assert not isinstance(whole.prior, str)
    spent = time.seconds
    for part in (0.1, 0.6):
        time.seconds, budget = 0.0, part * spent
        result = report(model, guide, X, seed=0, time_budget=budget)
        assert time.seconds < budget + 60  # a run, a transition, or a chunk
        missing = [text for text in (result.no_chains, result.prior) if isinstance(text, str)]
        assert part > 0.3 or any(f"time_budget={budget:g} ended" in text for text in missing)
        assert not result.trusted or result.evidence.num_particles >= 500 or result.chains
        print(result)


def one_weight(time):
    """A model whose run takes one second, with one weight, and a guide far from its posterior."""

    def model(x):
        time.seconds += 1.0
        z = pyro.sample("z", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        pyro.sample("x", dist.Normal(z, 0.1).to_event(1), obs=x)

    def guide(x):
        loc = pyro.param("loc", torch.zeros(3))
        pyro.sample("z", dist.Normal(loc, 0.5).to_event(1))

    return model, guide


def test_the_check_of_the_training_ends_with_the_budget(time):
    model, guide = one_weight(time)
    guide(X)
    result = report(model, guide, X, seed=0, check_modes=False, run_chains=False, time_budget=40)
    assert time.seconds < 40 + 10
    assert not result.converged
    assert "the time budget ended" in " ".join(str(result).split())


def test_draws_by_weights_and_by_chains_share_a_budget(time):
    """The draws that are known are returned, and their verdict names what did not end."""
    model, guide = one_weight(time)
    guide(X)
    draws = refine(model, guide, X, num_samples=20, seed=0, time_budget=30)
    assert time.seconds < 30 + 10
    assert len(draws["z"]) == 20
    assert not draws.verdict.trusted
    assert "chains did not end (refine: time_budget=30 ended" in str(draws.verdict)


def test_fewer_draws_of_the_posterior(time, caplog):
    begin = time.seconds
    options = {"schedule": 2, "warmup": 1, "num_particles": 2, "chunk_size": 8, "seed": 0}
    whole = refine(*programs(time), X, num_samples=40, **options)
    spent = time.seconds - begin
    part = refine(*programs(time), X, num_samples=40, time_budget=spent / 2, **options)
    assert 4 <= part.num_samples < 40
    assert f"{part.num_samples} of 40 draws" in caplog.text
    assert torch.equal(part["z"], whole["z"][: part.num_samples])
    with pytest.raises(OutOfTimeError, match="refine: time_budget=3 ended"):
        refine(*programs(time), X, num_samples=40, time_budget=3, **options)


@pytest.mark.slow
def test_whole_simulations_of_a_sandwich(time):
    model, guide = programs(time)
    begin = time.seconds
    options = {"num_particles": 3, "schedule": 3, "warmup": 1, "chunk_size": 1, "seed": 0}
    whole = sandwich(model, guide, X, num_simulations=6, **options)
    spent = time.seconds - begin
    part = sandwich(model, guide, X, num_simulations=6, time_budget=spent / 2, **options)
    count = len(part.lower)
    assert 1 <= count < 6
    assert torch.equal(part.lower, whole.lower[:count])
    assert torch.equal(part.upper, whole.upper[:count])


@pytest.mark.slow
def test_each_loss_has_an_equal_part_of_the_budget(time, monkeypatch):
    model, guide = programs(time)
    monkeypatch.setattr("pyro_mcvae.evaluation.compare.time.perf_counter", time)
    losses = {"ELBO": Trace_ELBO(), "again": Trace_ELBO(), "IWAE": TraceIWAE_ELBO(2)}
    options = {"losses": losses, "optim": Adam({"lr": 0.01}), "num_steps": 3000, "seed": 0}
    result = compare(model, guide, X, num_particles=20, num_checks=3, time_budget=900.0, **options)
    steps = [len(trained.bounds) for trained in result.values()]
    assert min(steps) > 100
    assert max(trained.seconds for trained in result.values()) <= 0.7 * 300 + 2
    assert max(t.seconds for t in result.values()) - min(t.seconds for t in result.values()) < 3
    for name, count in zip(result, steps, strict=True):
        assert f"{name}: the time budget ended; training ended after {count} steps" in str(result)


def test_models_that_are_compared_share_a_budget(time, caplog):
    pairs = {"a": programs(time), "b": programs(time)}
    result = compare_models(pairs, X, num_particles=1000, time_budget=16.0, seed=0)
    counts = [evidence.num_particles for evidence in result.values()]
    assert all(100 <= count < 1000 for count in counts)
    assert "compare_models: time_budget=16 ended" in caplog.text


@pytest.mark.slow
def test_lines_reach_the_log_without_a_configuration(time, caplog):
    """Outside a terminal, Python shows warnings of a logger without handlers."""
    log_evidence(*programs(time), X, num_particles=300, chunk_size=1)
    assert {r.levelno for r in caplog.records if "draws after" in r.getMessage()} == {
        logging.WARNING
    }
    assert len([r for r in caplog.records if "draws after" in r.getMessage()]) > 10


@pytest.mark.slow
def test_a_search_for_labellings_that_does_not_end_is_named(time, caplog, monkeypatch):
    """Then nothing is added: the evidence is that of one labelling."""

    def model():
        m = pyro.sample("m", dist.Normal(torch.zeros(2), 5.0).to_event(1))
        with pyro.plate("data", 4):
            c = pyro.sample(
                "c", dist.Categorical(torch.ones(2) / 2), infer={"enumerate": "parallel"}
            )
            pyro.sample("x", dist.Normal(m[c], 1.0), obs=torch.tensor([-3.0, -2.5, 2.5, 3.0]))

    def guide():
        pyro.sample("m", dist.Normal(torch.tensor([-2.8, 2.8]), 0.5).to_event(1))

    options = {"num_particles": 20, "schedule": 2, "seed": 0}
    whole = log_evidence(model, guide, **options)
    check = Stage.check

    def ends(stage):
        if stage.text.startswith("labellings"):
            raise OutOfTimeError
        check(stage)

    monkeypatch.setattr(Stage, "check", ends)
    part = log_evidence(model, guide, **options)
    assert part.labellings is None
    assert float(whole.total - part.total) == pytest.approx(whole.labellings.added, abs=1e-5)
    assert "no search for exchangeable components" in caplog.text


@pytest.mark.slow
def test_an_ensemble_returns_the_draws_of_its_transitions(time):
    """Without a guide: a budget ends the chains, which say so; or nothing is known yet."""
    model, _ = programs(time)
    whole = refine(model, X, seed=0)
    seconds, time.seconds = time.seconds, 0.0
    with pytest.raises(OutOfTimeError, match="ensemble of chains"):
        refine(model, X, seed=0, time_budget=3)
    known = []
    for part in range(3, 10, 2):
        time.seconds = 0.0
        try:
            known.append(refine(model, X, seed=0, time_budget=0.1 * part * seconds))
        except OutOfTimeError:
            assert not known  # a longer budget knows more
    assert whole.verdict.trusted
    assert any("time budget ended" in str(draws.verdict) for draws in known)
    assert all(draws["z"].shape == (1000, 3) for draws in known)
