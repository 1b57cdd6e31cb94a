"""Each test and each doctest starts alone: its own seed, no parameters, Pyro's checks on."""

import gc
import os
import zlib
from collections.abc import Iterator

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO

import pyro_mcvae


def pytest_configure() -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)  # The workers already occupy the cores.


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: no later garbage collection has to search them."""
    gc.collect()
    gc.freeze()


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
    if isinstance(request.node, pytest.DoctestItem):  # An example writes where its reader would.
        request.getfixturevalue("monkeypatch").chdir(request.getfixturevalue("tmp_path"))
    yield
    pyro.settings.set(**settings)


@pytest.fixture(autouse=True, scope="session")
def names_in_doctests(doctest_namespace: dict[str, object]) -> None:
    """What the examples in docstrings use without importing it."""
    exports = {name: getattr(pyro_mcvae, name) for name in pyro_mcvae.__all__}
    doctest_namespace.update(
        exports, SVI=SVI, Trace_ELBO=Trace_ELBO, dist=dist, pyro=pyro, torch=torch
    )
