"""Each test and each doctest starts alone: its own seed, no parameters, Pyro's checks on."""

import os
import zlib
from collections.abc import Iterator

import pyro
import pytest
import torch


def pytest_configure() -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)  # The workers already occupy the cores.


@pytest.fixture(autouse=True)
def alone(request: pytest.FixtureRequest) -> Iterator[None]:
    """Clear, seed, validate; afterwards put all of Pyro's global settings back."""
    settings = pyro.settings.get()
    marker = request.node.get_closest_marker("init")
    # From the name: the same in every run and order, and different from one test to the next.
    seed = marker.kwargs["rng_seed"] if marker else zlib.crc32(request.node.name.encode())
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    pyro.enable_validation(True)
    yield
    pyro.settings.set(**settings)
