"""Progress bars of evaluators reach their totals, and are hidden by default in files."""

import pytest

from pyro_mcvae import compare_models, log_evidence, refine, report, sandwich
from tests.models import ConjugateGaussian

EXACT = ConjugateGaussian(N=4)
SMALL = {"num_particles": 20, "schedule": 3, "warmup": 2, "chunk_size": 7}


@pytest.mark.parametrize(
    ("evaluator", "show"),
    [
        *((evaluator, True) for evaluator in (log_evidence, refine, report, sandwich)),
        *((log_evidence, show) for show in (None, False)),
    ],
)
def test_bars_end_at_their_totals(evaluator, show, monkeypatch, capsys):
    import tqdm.auto

    bars = []

    class Bar(tqdm.auto.tqdm):
        def close(self):
            bars.append((self.n, self.total))
            super().close()

    monkeypatch.setattr(tqdm.auto, "tqdm", Bar)
    own = {refine: {"num_samples": 5}, sandwich: {"to_args": lambda data: ()}}
    options = {**SMALL, **own.get(evaluator, {})}
    evaluator(EXACT.model, EXACT.guide, progress=show, **options)
    assert bars
    if show:
        assert all(n == total > 0 for n, total in bars)
    assert (evaluator.__name__ in capsys.readouterr().err) == bool(show)


def test_models_have_a_bar_each(capsys):
    pairs = dict.fromkeys(("a", "b"), (EXACT.model, EXACT.guide))
    compare_models(pairs, num_particles=20, progress=True)
    assert "compare_models" in capsys.readouterr().err
