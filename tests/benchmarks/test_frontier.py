"""The benchmark of chains that train: its models, a short run of each kind, and its table."""

from argparse import Namespace
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch

from tests.benchmarks import frontier
from tests.benchmarks.growing import GrowingFile

OPTIONS = {"data_root": Path(), "seed": 0, "training": 4, "guide_training": 4, "backend": "eager"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "method"),
    [("brownian", "mass and network"), ("seeds", "full-rank default")],
)
def test_rows_are_written_read_and_shown(model, method, tmp_path, monkeypatch):
    monkeypatch.setattr(frontier, "TRAINED", {})
    row = frontier.run(Namespace(**OPTIONS), model, method, 2, 0.003)
    file = tmp_path / "rows.csv"
    GrowingFile(file, frontier.Row).add(row)
    (again,) = GrowingFile(file, frontier.Row).all
    assert again == row
    better = frontier.Row(model, method, 2, 0.001, 4, 0, row.bound + 1, row.error, 0.0)
    shown = f"| {model} | 2 | {better.bound:.2f} ± {row.error:.2f} |"
    assert frontier.table([row, better]).splitlines()[-1] == shown


def test_brownian_motion_is_a_random_walk_from_zero():
    trace = pyro.poutine.trace(frontier.brownian(Path())).get_trace()
    nodes = trace.nodes
    z, scale = nodes["z"]["value"], nodes["innovation"]["value"]
    steps = torch.cat([z[:1], z.diff()])
    walk = dist.Normal(0.0, scale).log_prob(steps).sum()
    assert torch.allclose(nodes["z"]["fn"].log_prob(z), walk)
