"""The docstrings of all exports: what a reader of the reference relies upon."""

import ast
import builtins
import doctest
import importlib
import inspect
import re
from pathlib import Path

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


def free_names(source: str) -> set[str]:
    """The names that an example uses and neither imports nor defines."""
    used, bound = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
    return used - bound - set(dir(builtins))


def entries() -> list[str]:
    """Return the names of all entries of the reference, with their modules."""
    result, module = set(), "pyro_mcvae"
    for path in sorted((Path(__file__).parents[2] / "docs" / "api").glob("*.md")):
        for directive, name in re.findall(r"^\.\. (\w+):: ([\w.]+)", path.read_text(), re.M):
            if directive == "currentmodule":
                module = name
            else:
                result.add(name if "." in name else f"{module}.{name}")
    return sorted(result | {f"pyro_mcvae.{name}" for name in NAMES})


@pytest.mark.parametrize("entry", entries())
def test_examples_import_what_they_use_and_print_results(entry: str) -> None:
    """So that a copied example runs, and a reader sees more than True."""
    module, _, name = entry.rpartition(".")
    value = getattr(importlib.import_module(module), name)
    methods = vars(value).values() if inspect.isclass(value) else ()
    for text in {inspect.getdoc(v) or "" for v in (value, *methods) if not isinstance(v, str)}:
        examples = doctest.DocTestParser().get_examples(text)
        if not all(example.options.get(doctest.SKIP) for example in examples):
            assert free_names("".join(e.source for e in examples)) == set()
        assert not any(e.want.strip() == "True" for e in examples)


def test_long_docstrings_are_pages() -> None:
    assert len((pyro_mcvae.TraceSIS_ELBO.__doc__ or "").splitlines()) <= 60


@pytest.mark.parametrize("name", ["log_evidence", "report", "refine", "compare", "sandwich"])
def test_evaluators_show_their_arguments(name: str) -> None:
    parameters = inspect.signature(getattr(pyro_mcvae, name)).parameters
    assert {"num_particles", "schedule", "seed", "time_budget"} <= set(parameters)
    assert all(p.kind is not p.VAR_KEYWORD for p in parameters.values())
