"""Runs guide and model, one after the other, on one minibatch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import cached_property
from types import CellType
from typing import Any, TypeVar, cast

import torch
from pyro import poutine
from pyro.infer import ELBO, SVI
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_struct import Trace
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pyro_mcvae.programs import sites
from pyro_mcvae.programs.enumeration import StateMessenger
from pyro_mcvae.programs.errors import SiteError
from pyro_mcvae.programs.leading import ALONE, Leading
from pyro_mcvae.programs.messengers import ParticlePlate, Recorder, Substitutes
from pyro_mcvae.programs.types import Program, SiteChanges

__all__ = [
    "Programs",
    "entered",
    "is_messenger",
    "run_model",
    "run_pair",
    "with_changes",
]

_FLAGS = (bool, str, type(None))
_LEAVES = (Tensor, *_FLAGS)

T = TypeVar("T")


@dataclass(frozen=True)
class Programs:
    """A model and a guide with the arguments of one call."""

    model: Program
    guide: Program
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __post_init__(self) -> None:
        for role, program in (("model", self.model), ("guide", self.guide)):
            if not callable(program) or isinstance(program, type | ELBO | SVI):
                raise _no_program(role, program)

    @property
    def pair(self) -> tuple[Program, Program]:
        return self.model, self.guide

    @cached_property
    def flags(self) -> tuple[object, ...]:
        """
        The choices that the programs can see: bool and str arguments, attributes of their object,
        closures; and the types of other arguments.
        """
        return tuple(_flags(self))

    @cached_property
    def _found(self) -> dict[Hashable, object]:
        return {}

    def once(self, key: Hashable, find: Callable[[], T]) -> T:
        """What ``find`` finds out about the programs of this call, looked for once."""
        if key not in self._found:
            self._found[key] = find()
        return cast("T", self._found[key])

    def forget(self) -> None:
        """Look for everything again."""
        self._found.clear()


def _no_program(role: str, found: object) -> ValueError:
    return ValueError(
        f"the {role} must be a Pyro program, such as a function or an object that is called with "
        f"the data, got {found!r}"
    )


def _flags(programs: Programs) -> Iterator[object]:
    for argument in (*programs.args, *programs.kwargs.values()):
        # Looking into trees is slow; None is no leaf of one for some versions of torch.
        for value in (argument,) if isinstance(argument, _LEAVES) else tree_leaves(argument):
            # A recording has a tensor without dims in the place of a float.
            number = isinstance(value, Tensor) and value.dim() == 0
            yield value if isinstance(value, _FLAGS) else float if number else type(value)
    yield tuple(programs.kwargs)
    for program in programs.pair:
        function = poutine.unwrap(program)
        attributes = getattr(getattr(function, "__self__", function), "__dict__", {}).items()
        yield from (pair for pair in attributes if isinstance(pair[1], _FLAGS))
        yield from map(_held, getattr(function, "__closure__", None) or ())


def _held(cell: CellType) -> object:
    """The flag that a closure holds, if it does."""
    try:
        value = cell.cell_contents
    except ValueError:
        return None  # not filled yet
    return value if isinstance(value, _FLAGS) else None


def is_messenger(programs: Programs) -> bool:
    """
    Whether the guide is a GuideMessenger that runs both programs at once.

    One around another program than the model, as ``poutine.block(model, hide=["y"])``, is a guide
    as others are: what it leaves out, the model has.
    """
    guide = _messenger(programs)
    return guide is not None and bool(guide.model == programs.model)


def _messenger(programs: Programs) -> Any:
    """The guide, if it is a handler around a program of its own; else None."""
    guide = poutine.unwrap(programs.guide)
    return guide if isinstance(guide, Messenger) else None


def _not_separate(programs: Programs) -> SiteError:
    return SiteError(
        f"this objective separates the gradients of guide and model, but the guide "
        f"{type(poutine.unwrap(programs.guide)).__name__} runs both at once: use another "
        f"guide, or, for chains, gradient_estimator='auto'"
    )


def run_pair(
    programs: Programs, substitutes: Substitutes, leading: Leading = ALONE
) -> tuple[Trace, Trace]:
    """
    Run the guide, then the model on its draws.

    :param substitutes: values and the minibatch.
    :param leading: the leading dims, with the particles' plates.
    :returns: ``(guide_trace, model_trace)``
    :raises SiteError: for a guide that runs both, whose draws are to reach the model apart.
    """
    if is_messenger(programs):
        return _run_messenger(programs, substitutes, leading)
    with Recorder(substitutes) as recorder, entered(leading.guide):
        programs.guide(*programs.args, **programs.kwargs)
    messenger = _messenger(programs)
    # Its own trace also has what the program inside of it observes.
    drawn = guide_trace = recorder.trace if messenger is None else messenger.get_traces()[1]
    if substitutes.attached is not None:
        drawn = _detached(drawn, substitutes.attached | set(substitutes.values))
    return guide_trace, run_model(programs, drawn, substitutes, leading)


def _run_messenger(
    programs: Programs, substitutes: Substitutes, leading: Leading
) -> tuple[Trace, Trace]:
    """Run a GuideMessenger, which runs the model itself."""
    if substitutes.attached is not None:
        raise _not_separate(programs)
    both, guide_plate, model_plate = None, leading.guide, leading.model
    if guide_plate is not None and model_plate is not None:
        # One plate for one run: it leaves out the global sites of both programs.
        skip = guide_plate.skip | model_plate.skip
        both = ParticlePlate(guide_plate.size, guide_plate.depth, skip)
    with Recorder(substitutes, records=False), entered(both):
        programs.guide(*programs.args, **programs.kwargs)
    model_trace, guide_trace = poutine.unwrap(programs.guide).get_traces()
    for plate in (guide_plate, model_plate):
        if plate is not None and both is not None:
            plate.unbatched |= both.unbatched
    return guide_trace, model_trace


def run_model(
    programs: Programs, guide_trace: Trace, substitutes: Substitutes, leading: Leading = ALONE
) -> Trace:
    """Run the model on the draws of a guide's trace; ``leading`` as of :func:`run_pair`."""
    state_dim = leading.state_dim
    states = None if state_dim is None else StateMessenger(guide_trace, state_dim)
    drawn = guide_trace if states is None else None
    noise = None if substitutes.noise is None else substitutes.noise.of_run()
    with Recorder(substitutes, drawn) as recorder, entered(states, leading.model, noise):
        programs.model(*programs.args, **programs.kwargs)
    return recorder.trace


def _detached(guide_trace: Trace, but: frozenset[str]) -> Trace:
    """A copy of a guide's trace whose draws begin a graph of their own."""
    leaves = {}
    for name, site in guide_trace.nodes.items():
        if sites.is_latent(site) and name not in but and site["value"].is_floating_point():
            leaf = site["value"].detach().requires_grad_(torch.is_grad_enabled())
            leaves[name] = {"value": leaf}
    return with_changes(guide_trace, leaves)


def with_changes(trace: Trace, changes: SiteChanges) -> Trace:
    """A copy of a trace with other values, or annotations, at some sites."""
    changed = trace.copy()
    for name, fields in changes.items():
        changed.nodes[name] = {**trace.nodes[name], **fields}
    return changed


def entered(*handlers: AbstractContextManager[object] | None) -> ExitStack:
    """Enter the handlers that there are, the first one outermost."""
    stack = ExitStack()
    for handler in handlers:
        if handler is not None:
            stack.enter_context(handler)
    return stack
