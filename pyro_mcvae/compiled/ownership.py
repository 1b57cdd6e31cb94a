"""Whose a class is: the user's, or an installed package's."""

from __future__ import annotations

import sys
from argparse import Namespace
from types import FunctionType, ModuleType, SimpleNamespace

from pyro_mcvae.programs.source_lines import is_library, is_library_file

__all__ = ["is_of_the_user", "is_written", "methods"]


def methods(kind: type) -> list[object]:
    """The functions of a class, those behind properties and class methods included."""
    held = [h for part in kind.__mro__ for h in vars(part).values()]
    held += [getattr(h, name, None) for h in held for name in ("fget", "__func__", "func")]
    return [f for f in held if isinstance(f, FunctionType) and not is_library(f.__code__)]


def is_of_the_user(value: object) -> bool:
    """Whether an object's class is written outside of installed packages, in whole or in part."""
    if isinstance(value, SimpleNamespace | Namespace):
        return True
    if isinstance(value, type | ModuleType | FunctionType):
        return False
    return any(map(is_written, type(value).__mro__)) or bool(methods(type(value)))


def is_written(kind: type) -> bool:
    """Whether a class stands in a file, or a notebook, of the user's."""
    path = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ == "__main__" or bool(path and not is_library_file(path))
