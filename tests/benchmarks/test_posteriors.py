"""The benchmark of posteriors: names of objectives, and a file that grows."""

import math

import pytest

from pyro_mcvae import MALA, LinearSchedule
from tests.benchmarks.posteriors.objectives import objective
from tests.benchmarks.posteriors.rows import EVIDENCE, Row, Rows, tables


def test_names_say_what_the_objectives_are():
    assert objective("IWAE-100").num_particles == 100
    chains = objective("SIS-10x8")
    assert (chains.num_steps, chains.num_particles, chains.multi_sample) == (10, 8, True)
    papers = objective("AIS-MALA-5")
    assert isinstance(papers.kernel, MALA)
    assert isinstance(papers.schedule, LinearSchedule)
    for name in ("SIS", "IWAE-", "IWAE-ULA-3", "VAE-3", ""):
        with pytest.raises(ValueError, match="no objective"):
            objective(name)


def test_a_file_goes_on_where_it_was(tmp_path):
    key = ("abc", "schools", "AutoNormal", 0, 10, 5)
    rows = Rows(tmp_path / "rows.csv")
    rows.add(Row(*key, EVIDENCE, -3.5, 0.3))
    rows.add(Row(*key, EVIDENCE, -3.0, 0.2))
    rows.add(Row(*key, "SGVB", -4.0, 0.1, 1.5, 2.0, 3.0))
    rows.add(Row("def", *key[1:], "SGVB", -5.0, 0.1, 1.5, 2.0, 3.0))
    again = Rows(tmp_path / "rows.csv")
    assert again.all[2:] == rows.all[2:]
    assert again.has(key, "SGVB")
    assert not again.has(key, "SIS-5")
    # Of several estimates the surest one counts.
    printed = tables([*again.posteriors("abc", 10, 5)])
    assert "| schools, AutoNormal | -3.00 ± 0.20 | 1.00 ± 0.10 |" in printed


def test_a_step_that_was_too_dear_says_so(tmp_path):
    key = ("abc", "schools", "AutoNormal", 0, 10, 5)
    rows = Rows(tmp_path / "rows.csv")
    rows.add(Row(*key, EVIDENCE, -3.0, 0.2))
    rows.add(Row(*key, "IWAE-1000", math.nan, math.nan, 2500.0, 9.0))
    assert "| too dear: 2.5 s a step |" in tables([*rows.posteriors("abc", 10, 5)])
