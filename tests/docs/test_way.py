"""The path of a step in docs/architecture.md is that of the code, and it is not long."""

import re
from functools import partial
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_mcvae import TraceSIS_ELBO
from tests.benchmarks import reading_path
from tests.benchmarks.reading_path import PACKAGE

TEXT = (PACKAGE.parent / "docs/architecture.md").read_text().split("## The path of a step")[1]
PICTURE = TEXT.split("```text")[1].split("```")[0]
LINE = re.compile(r"^(\w+/\w+\.py) +(?:\w+\.)?(\w+)", re.M)


def model(x):
    with pyro.plate("data", 20, subsample_size=len(x)):
        z = pyro.sample("z", dist.Normal(x.new_zeros(2), 1.0).to_event(1))
        pyro.sample("x", dist.Normal(z.sum(-1), 1.0), obs=x)


def guide(x):
    with pyro.plate("data", 20, subsample_size=len(x)):
        loc = pyro.param("loc", torch.zeros(2))
        pyro.sample("z", dist.Normal(loc + x.unsqueeze(-1), 0.5).to_event(1))


def way():
    """File and name of the functions that a warm step enters, in the order of the first time."""
    step = partial(TraceSIS_ELBO(2).loss_and_grads, model, guide, torch.ones(3))
    step()
    codes = reading_path.entered(step)
    return [(Path(c.co_filename).relative_to(PACKAGE).as_posix(), c.co_name) for c in codes]


@pytest.mark.slow
def test_a_step_goes_the_way_of_the_picture():
    drawn, result = LINE.findall(PICTURE), way()
    places = [result.index(line) for line in drawn]
    assert len(drawn) == sum(bool(line.strip()) for line in PICTURE.splitlines())
    assert places == sorted(places)


@pytest.mark.slow
def test_the_picture_has_every_room_of_the_way():
    subpackages = {file.split("/")[0] for file, _ in LINE.findall(PICTURE)}
    assert subpackages == {file.split("/")[0] for file, _ in way()} - {"ops"}


@pytest.mark.parametrize(("objective", "most"), [("SIS-5, ULA", 1622), ("SIS-5", 1670)])
def test_a_step_of_a_chain_has_a_bounded_number_of_lines(objective, most):
    _, _, _, lines = reading_path.measured(objective)
    assert lines <= most
