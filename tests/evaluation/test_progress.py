"""Progress bars of evaluators: they end at their total, and cost nothing if they are hidden."""

import sys
from types import SimpleNamespace

import pytest

from pyro_mcvae import (
    compare_models,
    log_evidence,
    refine,
    report,
    sandwich,
)
from pyro_mcvae.programs import progress
from tests.models import ConjugateGaussian


class Bar:
    """What of ``tqdm`` is used; made ones are remembered."""

    made: list["Bar"] = []  # noqa: RUF012

    def __init__(self, **options):
        self.options, self.total, self.n, self.closed = options, options["total"], 0.0, False
        self.disable = bool(options["disable"])
        self.made.append(self)

    def update(self, count):
        self.n += count

    def set_postfix_str(self, text, refresh):
        pass

    def close(self):
        self.closed = True


@pytest.fixture
def bars(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", SimpleNamespace(tqdm=Bar))
    Bar.made.clear()
    return Bar.made


CALLS = {
    "weights": lambda m, g, **o: log_evidence(m, g, chunk_size=7, num_particles=30, **o),
    "chains": lambda m, g, **o: log_evidence(m, g, schedule=4, num_particles=5, **o),
    "refine": lambda m, g, **o: refine(m, g, num_samples=9, chunk_size=25, **o),
    "moved": lambda m, g, **o: refine(m, g, num_samples=3, schedule=3, **o),
    "report": lambda m, g, **o: report(m, g, num_particles=20, **o),
    "sandwich": lambda m, g, **o: sandwich(m, g, schedule=2, to_args=lambda data: (), **o),
    "models": lambda m, g, **o: compare_models({"a": (m, g), "b": (m, g)}, num_particles=20, **o),
}


@pytest.mark.parametrize("call", CALLS)
def test_work_ends_where_it_was_said_to(call, bars):
    exact = ConjugateGaussian(N=3)
    CALLS[call](exact.model, exact.guide, progress=True)
    seen = [bar for bar in bars if bar.options["disable"] is not True]
    assert seen
    for bar in seen:
        assert bar.closed
        assert bar.n == pytest.approx(bar.total)
        assert bar.n > 1
        assert bar.options["disable"] is False


def test_long_evaluations_log_their_progress_without_a_terminal(monkeypatch, caplog):
    exact = ConjugateGaussian(N=3)
    log_evidence(exact.model, exact.guide, num_particles=30, chunk_size=7)
    assert "done" not in caplog.text  # less than a minute
    monkeypatch.setattr(progress, "_EVERY", 0.0)
    log_evidence(exact.model, exact.guide, num_particles=30, chunk_size=7, progress=False)
    assert "done" not in caplog.text
    log_evidence(exact.model, exact.guide, num_particles=30, chunk_size=7)
    assert "evaluating: 23 % done" in caplog.text
    assert "evaluating: 100 % done" in caplog.text


def test_none_waits_and_leaves_files_alone(bars):
    exact = ConjugateGaussian(N=3)
    log_evidence(exact.model, exact.guide, num_particles=5)
    assert bars[0].options["disable"] is None
    assert bars[0].options["delay"] == 2
    log_evidence(exact.model, exact.guide, num_particles=5, progress=False)
    assert all(bar.options["disable"] for bar in bars[1:])
    with pytest.raises(ValueError, match="progress must be True, False or None, got 'no'"):
        log_evidence(exact.model, exact.guide, progress="no")
