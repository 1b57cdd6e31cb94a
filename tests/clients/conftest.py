"""Tests with other packages, and with Pyro's examples: ``pytest -m clients``."""

import importlib
import warnings
from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.fixture
def client() -> Callable[[str], ModuleType]:
    """Imports a package that the extra ``clients`` brings, or skips the test."""

    def imported(name: str) -> ModuleType:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # theirs
            try:
                return importlib.import_module(name)
            except Exception as error:  # of a package, or of two releases that do not go together
                pytest.skip(f"needs {name}, of the extra 'clients', which says: {error!r}")

    return imported
