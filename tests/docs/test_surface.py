"""The public names of every exported class: those that the docs describe, and no others."""

import ast
import functools
import inspect
import re
import textwrap
from pathlib import Path

import pytest

import pyro_mcvae

CLASSES = [n for n in sorted(pyro_mcvae.__all__) if inspect.isclass(getattr(pyro_mcvae, n))]
KNOWN = Path(__file__).parent / "surface.txt"

# Parameters and buffers: what a state_dict has by name, and what a docstring says of them together.
STATE = {
    "AdaptiveStepSize": {"base", "begun", "most", "power", "value"},
    "LearnedMomentum": {"logit"},
    "LearnedSchedule": {"logits"},
    "LearnedStepSize": {"left", "log_value", "start"},
    "LinearSchedule": {"betas"},
    "ScoreNetwork": {"drift", "hidden", "inputs", "time"},
    "SigmoidSchedule": {"log_slope"},
}
# Attributes of learned parts of an objective, and attributes that other subpackages read.
PARTS = {"param_name", "packing", "plan", "plain", "slots"}
# Arguments that a class takes from its base, whose docstring has them, or that are one of its own.
INHERITED = {
    "MonteCarloEM": {
        *{"baseline", "gradient_estimator", "multi_sample", "schedule"},
        *{"budget", "num_categories", "num_samples"},
    },
    "REBAR": {"control", "log_temperature"},
    "RELAX": {"log_temperature"},
    "TraceIWAE_ELBO": {"alpha"},
}


def ours(cls: type) -> list[type]:
    return [base for base in cls.__mro__ if base.__module__.startswith("pyro_mcvae")]


@functools.cache
def own_names(cls: type) -> set[str]:
    """The members of one class, and what its methods set on ``self``."""
    names = {*vars(cls), *vars(cls).get("__annotations__", {})}
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(cls)))):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                names.add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            registers = node.func.attr in ("register_buffer", "register_parameter")
            if registers and isinstance(node.args[0], ast.Constant):
                names.add(str(node.args[0].value))
    return names


def public(cls: type) -> set[str]:
    """Of the classes of this package: their members, and what their methods set on ``self``."""
    names: set[str] = set().union(*map(own_names, ours(cls)))
    theirs = set().union(*(vars(base) for base in cls.__mro__ if base not in ours(cls)))
    return {name for name in names if not name.startswith("_")} - theirs


def explained(cls: type, name: str) -> bool:
    """By a field of the class's docstring, or a docstring of its own or of what it overrides."""
    text = "".join(inspect.getdoc(base) or "" for base in ours(cls))
    if re.search(rf":(?:param|ivar|cvar)\b[^:]*\b{name}:", text):
        return True
    result = [vars(base)[name] for base in ours(cls) if name in vars(base)]
    kinds = (property, classmethod, staticmethod)
    described = [v for v in result if callable(v) or isinstance(v, kinds) or hasattr(v, "func")]
    return any(inspect.getdoc(v) for v in described)


@pytest.mark.parametrize("name", CLASSES)
def test_every_public_name_is_explained(name: str) -> None:
    cls = getattr(pyro_mcvae, name)
    excused = PARTS.union(*(STATE.get(b.__name__, set()) for b in ours(cls)))
    excused = excused.union(*(INHERITED.get(b.__name__, set()) for b in ours(cls)))
    assert {n for n in public(cls) if not explained(cls, n)} - excused == set()


def test_no_name_comes_unnoticed() -> None:
    """``surface.txt`` has them all: who adds one to it has thought of whether users need it."""
    result = [f"{n}: {' '.join(sorted(public(getattr(pyro_mcvae, n))))}".strip() for n in CLASSES]
    assert KNOWN.read_text(encoding="utf-8").splitlines() == result


def test_the_names_of_a_class_are_found() -> None:
    result = public(pyro_mcvae.TruncatedPosterior)
    assert {"fit", "for_data", "posterior", "evolution", "num_states"} <= result
    assert not result & {"begin", "evaluate", "search", "synchronize", "store", "named_parameters"}


# Exports with more than one argument that is clear without its name.
POSITIONAL = {
    **dict.fromkeys(["compare", "log_evidence", "refine", "report", "sandwich"], 2),
    **dict.fromkeys(["BernoulliPrior", "GaussianNoise", "low_dimensional_evidence"], 2),
    **dict.fromkeys(["load_checkpoint", "save_checkpoint", "RankBatches", "Proposal"], 2),
    **dict.fromkeys(["MonteCarloEM", "TraceAIS_ELBO", "TraceSIS_ELBO", "TruncatedPosterior"], 2),
    **dict.fromkeys(["LearnedMomentum", "LearnedStepSize", "TraceRaoBlackwell_ELBO"], 2),
    **dict.fromkeys(["CompiledELBO", "TraceRenyi_ELBO"], 2),
    **dict.fromkeys(["Estimate", "EvolutionaryUpdate", "local_estimate"], 3),
    "Noise": 5,
}


@pytest.mark.parametrize("name", sorted(pyro_mcvae.__all__))
def test_other_arguments_are_keywords(name: str) -> None:
    """So that a call can be read without the signature, and arguments can be added in any order."""
    parameters = inspect.signature(getattr(pyro_mcvae, name)).parameters.values()
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    by_position = [p.name for p in parameters if p.kind in kinds]
    assert len(by_position) <= POSITIONAL.get(name, 1), by_position
