"""The docstrings of all exports: what a reader of the reference relies upon."""

import inspect
import re

import pytest

import pyro_mcvae

NAMES = sorted(pyro_mcvae.__all__)
# Evaluators share the arguments of log_evidence, and their docstrings say so.
SHARED = set(inspect.signature(pyro_mcvae.log_evidence).parameters)


def docstring(name: str) -> str:
    text = inspect.getdoc(getattr(pyro_mcvae, name))
    assert text, name
    return text


@pytest.mark.parametrize("name", NAMES)
def test_there_is_an_example(name: str) -> None:
    text = docstring(name)
    if ">>>" not in text:  # what a function returns is shown by the function's example
        (function,) = set(re.findall(r":(?:func|class):`(\w+)`[^.]*example", text, re.S))
        assert ">>>" in docstring(function)


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_explained(name: str) -> None:
    value, text = getattr(pyro_mcvae, name), docstring(name)
    if name in (
        "StatePosterior",
        "PosteriorDraws",
        "ModelComparison",
    ):  # made by methods and functions of ours
        return
    variable = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    for parameter in inspect.signature(value).parameters.values():
        if parameter.kind in variable:
            continue
        field = rf":(?:param|ivar|cvar)\b[^:]*\b{parameter.name}:"
        shared = "log_evidence`" in text and parameter.name in SHARED
        assert re.search(field, text) or shared, parameter.name
