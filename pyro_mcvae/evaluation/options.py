"""What every judge takes: the programs with their arguments, and the same options."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from textwrap import indent
from typing import TypeVar

from torch import Tensor, nn

from pyro_mcvae.chains.kernel import Kernel
from pyro_mcvae.chains.schedules import Schedule
from pyro_mcvae.evaluation.annealing import (
    LEAVE_OUT,
    Annealing,
    JudgeCoordinates,
    make_annealing,
)
from pyro_mcvae.ops.checks import check_count, check_flag
from pyro_mcvae.ops.notices import each_once
from pyro_mcvae.programs.execution import Programs
from pyro_mcvae.programs.types import Program

__all__ = ["Options", "judge", "make_options", "shows_options"]

Result = TypeVar("Result")

# How many numbers the draws of one chunk may have by default, over all sites.
_CHUNK = 1 << 23


@dataclass(frozen=True)
class Options:
    """
    The options that all judges share.

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
    coordinates: JudgeCoordinates = "noise"
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


def judge(
    without: Collection[str] = (), **defaults: object
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """
    Let ``function(programs, options, **own)`` be called with a model, a guide, their arguments and
    options.

    Keywords that are options, or the function's own, are ours; others are the programs'. Where
    programs have an argument of the same name, ``model_kwargs`` holds all of theirs.

    :param without: options that the function does not take.
    :param defaults: its defaults of others.
    """

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        own = _own(function)
        shared = _shared(without, defaults)
        ours = {p.name for p in (*own, *shared)}

        @functools.wraps(function)
        def call(
            model: Program,
            guide: Program,
            *args: object,
            model_kwargs: Mapping[str, object] | None = None,
            **given: object,
        ) -> Result:
            options = {n: v for n, v in given.items() if n in ours}
            rest = {n: v for n, v in given.items() if n not in ours}
            kwargs = _program_kwargs(function.__name__, model_kwargs, rest)
            programs = Programs(model, guide, args, kwargs)
            if model_kwargs is None:
                _check_foreign(function.__name__, programs, rest, ours)
            taken = set(options) if model_kwargs is None else {"model_kwargs"} - set(model_kwargs)
            _check_unambiguous(function.__name__, programs, taken)
            particular = {p.name: options.pop(p.name) for p in own if p.name in options}
            with each_once():
                return function(programs, Options(**{**defaults, **options}), **particular)  # type: ignore[arg-type]

        _show(call, [*_FIRST, *own, *shared, *_LAST], _MODEL_KWARGS)
        return call

    return decorate


def shows_options(function: Callable[..., Result]) -> Callable[..., Result]:
    """Let a function's ``**options`` be seen in its signature and its docstring."""
    own = list(inspect.signature(function).parameters.values())[:-1]
    _show(function, [*own, *_shared({p.name for p in own}, {})])
    return function


def make_options(name: str, given: Mapping[str, object]) -> Options:
    """
    The options that a judge was given.

    :param name: the judge's.
    :raises TypeError: for others.
    """
    known = [f.name for f in fields(Options)]
    for other in given.keys() - set(known):
        raise TypeError(f"{name} has no option '{other}': it takes {', '.join(known)}")
    return Options(**given)  # type: ignore[arg-type]


_FIRST = [
    inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation="Program"),
    inspect.Parameter("guide", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation="Program"),
    inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
]
_LAST = [
    inspect.Parameter("model_kwargs", inspect.Parameter.KEYWORD_ONLY, default=None),
    inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
]
_MODEL_KWARGS = """\
:param model_kwargs: all keyword arguments of the programs, in a dict: where one of theirs has the
    name of an option, or by choice. By default they are the keywords that are no options.
"""


def _own(function: Callable[..., object]) -> list[inspect.Parameter]:
    """What a judge takes beside the options that all share: its keyword-only parameters."""
    parameters = inspect.signature(function).parameters.values()
    return [p for p in parameters if p.kind == p.KEYWORD_ONLY]


def _shared(without: Collection[str], defaults: Mapping[str, object]) -> list[inspect.Parameter]:
    return [
        inspect.Parameter(
            f.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults.get(f.name, f.default),
            annotation=f.type,
        )
        for f in fields(Options)
        if f.name not in without
    ]


def _show(
    function: Callable[..., object], parameters: list[inspect.Parameter], more: str = ""
) -> None:
    """Give a function its signature, and the options' descriptions where its docstring says so."""
    returns = inspect.signature(function).return_annotation
    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        parameters, return_annotation=returns
    )
    if function.__doc__ is None or Options.__doc__ is None:  # python -OO
        return
    text = function.__doc__
    known = re.findall(r":param[^:]*?(\w+):", text)
    wanted = {p.name for p in parameters} - set(known)
    found = [entry for name, entry in _entries(inspect.cleandoc(Options.__doc__)) if name in wanted]
    entries = "".join([*found, more]).rstrip()
    # From Python 3.13 on, the compiler has taken the margin of a docstring away.
    function.__doc__ = re.sub(r"( *)\{options\}", lambda at: indent(entries, at[1]), text)


def _entries(text: str) -> Iterator[tuple[str, str]]:
    """The fields of a docstring, by the parameter that they describe."""
    for entry in re.findall(r"^:param.*\n(?:    .*\n?)*", text + "\n", re.M):
        yield entry[: entry.index(":", 1)].split()[-1], entry


def _program_kwargs(
    judge_name: str, model_kwargs: Mapping[str, object] | None, rest: dict[str, object]
) -> dict[str, object]:
    if model_kwargs is None:
        return rest
    if not isinstance(model_kwargs, Mapping):
        raise ValueError(
            f"model_kwargs must be a dict of the programs' keyword arguments, got {model_kwargs!r}"
        )
    for name in rest:
        raise TypeError(
            f"{judge_name} has no option '{name}': with model_kwargs=, put all keyword arguments "
            f"of the programs into it"
        )
    return dict(model_kwargs)


def _check_foreign(
    judge_name: str, programs: Programs, rest: Collection[str], ours: Collection[str]
) -> None:
    """
    :raises TypeError: for an option of other judges that no program names as an argument.
    """
    for field in fields(Options):
        pair = programs.model, programs.guide
        if field.name in rest and not any(
            field.name in _open_arguments(program, programs.args) for program in pair
        ):
            raise TypeError(
                f"{judge_name} has no option '{field.name}': it takes {', '.join(sorted(ours))}; "
                f"an argument of the programs goes into model_kwargs={{'{field.name}': ...}}"
            )


def _check_unambiguous(judge_name: str, programs: Programs, taken: Collection[str]) -> None:
    """
    :raises ValueError: where a program has an argument of the name of an option that was given.
    """
    for role, program in (("model", programs.model), ("guide", programs.guide)):
        for name in taken:
            if name in _open_arguments(program, programs.args):
                raise ValueError(
                    f"'{name}' is an option of {judge_name} and an argument of the {role}: pass "
                    f"the programs' keyword arguments as model_kwargs={{'{name}': ...}} (or "
                    f"model_kwargs={{}}, to leave it out), and options beside it"
                )


def _open_arguments(program: Program, args: tuple[object, ...]) -> frozenset[str]:
    """The named arguments of a program that positional ones leave open, as far as it says."""
    target = program.forward if isinstance(program, nn.Module) else program
    try:
        signature = inspect.signature(target)
        filled = signature.bind_partial(*args).arguments
    except (TypeError, ValueError):
        return frozenset()
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    named = (p.name for p in signature.parameters.values() if p.kind in kinds)
    return frozenset(n for n in named if n not in filled)
