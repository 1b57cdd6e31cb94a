"""What all evaluators take: the model and the guide with their arguments, and the same options."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor, nn

from pyro_mcvae.chains.kernel import Kernel
from pyro_mcvae.chains.schedules import Schedule
from pyro_mcvae.evaluation.annealing import (
    LEAVE_OUT,
    Annealing,
    EvaluatorCoordinates,
    make_annealing,
)
from pyro_mcvae.ops.checks import check_count, check_flag
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.types import Program

# How many numbers the draws of one chunk may have by default, over all sites.
_CHUNK = 1 << 23


@dataclass(frozen=True)
class Options:
    """
    The options that all evaluators share.

    :param int num_particles: how many weights each datum has, K.
    :param schedule: for chains: a :class:`~pyro_mcvae.chains.schedules.Schedule`, a tensor from 0
        to 1, or the number of linear steps; 10 if only a kernel is given.
    :param Kernel kernel: for chains; :class:`HMC` with 3 leapfrog steps if only a schedule is
        given.
    :param str coordinates: what chains move, ``"noise"`` or ``"latent"``; ``"whitened"`` moves what
        makes the posterior about a standard normal, from a normal fitted to it: for guides that are
        far off. See :func:`log_evidence`.
    :param int warmup: annealed chains before the evaluation, from which an adaptive step size
        learns, one update each, and which are thrown away; 0 takes it as it is.
    :param int chunk_size: how many particles are run at once; by default as many as fit 64 MiB.
    :param joint: weigh global and local latents together; None does so if the guide draws global
        ones.
    :param int seed: for a random stream of its own.
    :param vectorize_particles: run the programs once per chunk, instead of once per particle; None
        where that has a loop's numbers.
    :param max_plate_nesting: as in Pyro; found out if it is left out.
    :param bool strict_enumeration_warning: refuse guide sites that are marked for enumeration,
        which are drawn otherwise.
    :param progress: show a bar, if ``tqdm`` is installed; None does on a terminal and in notebooks,
        for what takes longer than two seconds.
    """

    num_particles: int = 1000
    schedule: Schedule | Tensor | int | None = None
    kernel: Kernel | None = None
    coordinates: EvaluatorCoordinates = "noise"
    warmup: int = 20
    chunk_size: int | None = None
    joint: bool | None = None
    seed: int | None = None
    vectorize_particles: bool | None = None
    max_plate_nesting: float = math.inf
    strict_enumeration_warning: bool = False
    progress: bool | None = None

    def chunk(self, numbers: int) -> int:
        """How many particles are run at once, each of so many numbers."""
        return self.chunk_size or max(1, _CHUNK // max(1, numbers))

    def __post_init__(self) -> None:
        # An int of NumPy, or a tensor, is an int from here on.
        object.__setattr__(self, "num_particles", check_count("num_particles", self.num_particles))
        if self.chunk_size is not None:
            object.__setattr__(self, "chunk_size", check_count("chunk_size", self.chunk_size))
        check_flag("joint", self.joint, or_none=True)
        check_flag("vectorize_particles", self.vectorize_particles, or_none=True)
        check_flag("strict_enumeration_warning", self.strict_enumeration_warning)
        check_flag("progress", self.progress, or_none=True)

    def annealing(self, without: str = LEAVE_OUT) -> Annealing | None:
        """The transitions that were asked for; see :func:`make_annealing`."""
        return make_annealing(self.schedule, self.kernel, self.coordinates, self.warmup, without)


def prepare(
    evaluator: Callable[..., object],
    model: Program,
    guide: Program,
    args: tuple[object, ...],
    model_kwargs: Mapping[str, object] | None,
    keywords: Mapping[str, object],
    **defaults: object,
) -> tuple[Programs, Options]:
    """
    Divide the keywords of an evaluator's call into options and arguments of the programs.

    Names of options are options, all others are the programs'. If programs have an argument with
    the name of an option, ``model_kwargs`` holds all of their keyword arguments.

    :param evaluator: the function that was called, whose own parameters are options too.
    :param defaults: options that have other defaults in this evaluator.
    :raises ValueError: for a name that is an option and an argument of a program.
    """
    name, shared = evaluator.__name__, {f.name for f in fields(Options)}
    options = {n: v for n, v in keywords.items() if n in shared}
    rest = {n: v for n, v in keywords.items() if n not in shared}
    parameters = inspect.signature(evaluator).parameters.values()
    ambiguous = {*options, *(p.name for p in parameters if p.kind == p.KEYWORD_ONLY)}
    if model_kwargs is not None:
        if not isinstance(model_kwargs, Mapping):
            raise ValueError(
                f"model_kwargs must be a dict of the programs' keyword arguments, got "
                f"{model_kwargs!r}"
            )
        for other in rest:
            raise TypeError(
                f"{name} has no option '{other}': with model_kwargs=, put all keyword arguments "
                f"of the programs into it"
            )
        rest = dict(model_kwargs)
        ambiguous = {"model_kwargs"} - set(rest)
    programs = Programs(model, guide, args, rest)
    for role, program in (("model", model), ("guide", guide)):
        for option in sorted(ambiguous & _open_arguments(program, args)):
            raise ValueError(
                f"'{option}' is an option of {name} and an argument of the {role}: pass the "
                f"programs' keyword arguments as model_kwargs={{'{option}': ...}} (or "
                f"model_kwargs={{}}, to leave it out), and options beside it"
            )
    return programs, Options(**{**defaults, **options})  # type: ignore[arg-type]


def make_options(evaluator: str, keywords: Mapping[str, Any]) -> Options:
    """
    Make options of the keywords of an evaluator whose programs take none.

    :raises TypeError: for keywords that are no options.
    """
    known = [f.name for f in fields(Options)]
    for other in keywords.keys() - set(known):
        raise TypeError(f"{evaluator} has no option '{other}': it takes {', '.join(known)}")
    return Options(**keywords)


def _open_arguments(program: Program, args: tuple[object, ...]) -> set[str]:
    """The named arguments of a program that positional ones leave open, as far as it says."""
    target = program.forward if isinstance(program, nn.Module) else program
    try:
        signature = inspect.signature(target)
        filled = signature.bind_partial(*args).arguments
    except (TypeError, ValueError):
        return set()
    named = (
        p
        for p in signature.parameters.values()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY)
    )
    return {p.name for p in named} - set(filled)


def as_arguments(batch: object) -> tuple[tuple[object, ...], dict[str, object]]:
    """
    Positional and keyword arguments: those of a tuple or a list, of a mapping, or a single one.

    :raises ValueError: for None.
    """
    if batch is None:
        raise ValueError(
            "a batch, or what to_args makes of it, is None: return the programs' arguments, as a "
            "tuple, a dict of keyword arguments, or the only one"
        )
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})


def check_function(name: str, value: object) -> None:
    """Raise a ValueError unless ``value`` is a function, or None."""
    if value is not None and not callable(value):
        raise ValueError(f"{name} must be a function or None, got {value!r}")


def check_call(programs: Programs) -> None:
    """
    Check that a batch can be the programs' arguments.

    :raises ValueError: naming what a program says of arguments that it does not take.
    """
    for role, program in (("model", programs.model), ("guide", programs.guide)):
        target = program.forward if isinstance(program, nn.Module) else program
        try:
            # What is wrapped may be called with other arguments.
            signature = inspect.signature(target, follow_wrapped=False)
        except (TypeError, ValueError):
            continue
        try:
            signature.bind(*programs.args, **programs.kwargs)
        except TypeError as error:
            given = [*programs.args, *programs.kwargs.values()]
            raise ValueError(
                f"the {role} cannot be called with a batch, whose entries are its arguments "
                f"({', '.join(type(a).__name__ for a in given)}): {error}. Pass to_args=..., which "
                f"makes the arguments of a batch, such as to_args=lambda batch: (batch[0],)"
            ) from error
