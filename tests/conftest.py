"""Tests compute in double precision; doctests, which show what a user sees, do not."""

from collections.abc import Iterator

import hypothesis
import pytest
import torch

from pyro_mcvae.particles import runner
from pyro_mcvae.programs.vmap import Mode
from tests.device import simulated

# Autograd has a queue for each device that is known before its first backward pass.
if simulated.AVAILABLE:
    simulated.register()

# Examples that depend on the clock or on luck make a failure hard to see again.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def leading_dims_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several particles at once are run in a leading dim, or refused: no ``vmap``."""
    monkeypatch.setattr(runner, "_AT_ONCE", (Mode.BATCHED,))


# Needs NumPyro, which the tests do not.
collect_ignore = ["benchmarks/posteriordb/numpyro_side.py"]
