"""Runs guide and model, one after the other, on one minibatch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
from pyro import poutine
from pyro.infer import ELBO, SVI
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_struct import Trace
from torch import Tensor, nn

from pyro_mcvae.programs import sites
from pyro_mcvae.programs.enumeration import StateMessenger
from pyro_mcvae.programs.errors import SiteError
from pyro_mcvae.programs.isolation import LIBRARIES, owners_of
from pyro_mcvae.programs.leading import ALONE, Leading
from pyro_mcvae.programs.messengers import ParticlePlate, Recorder, Substitutes
from pyro_mcvae.programs.modules import closure_of, globals_of
from pyro_mcvae.programs.types import Program, SiteChanges

# What a program can branch on without reading a tensor.
_CHOICES = (bool, int, str, bytes, type(None), Enum, torch.dtype, torch.device)
# How many entries of a container of arguments are part of the key.
_MAX_ENTRIES = 64

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
    def choices(self) -> dict[str, Hashable]:
        """
        What the programs can branch on, by place: arguments, attributes, closures and globals that
        are no tensors, the sizes of containers, the types of everything else, and the modules'
        training modes.
        """
        found: dict[str, Hashable] = {}
        for i, value in enumerate(self.args):
            _add_choices(found, f"argument {i}", value)
        for name, value in self.kwargs.items():
            _add_choices(found, f"argument {name}", value)
        for role, program in (("model", self.model), ("guide", self.guide)):
            function = getattr(poutine.unwrap(program), "__func__", poutine.unwrap(program))
            _add_held(found, role, closure_of(function) | globals_of(function))
        for i, owner in enumerate(self.owners):
            if isinstance(owner, nn.Module):
                found[f"module {i} trains"] = owner.training
            if not type(owner).__module__.startswith(LIBRARIES):
                _add_held(found, f"object {i}", vars(owner))
        return found

    @cached_property
    def owners(self) -> list[object]:
        """The modules and other objects of which the programs may change the state."""
        return owners_of(*self.pair)

    @cached_property
    def _found(self) -> dict[Hashable, object]:
        return {}

    def once(self, key: Hashable, find: Callable[[], T]) -> T:
        """What ``find`` finds out about the programs of this call, looked for once."""
        if key not in self._found:
            self._found[key] = find()
        return cast("T", self._found[key])


def _no_program(role: str, found: object) -> ValueError:
    return ValueError(
        f"the {role} must be a Pyro program, such as a function or an object that is called with "
        f"the data, got {found!r}"
    )


def _add_choices(found: dict[str, Hashable], place: str, value: Any, depth: int = 4) -> None:
    """Add what one argument lets a program branch on."""
    if isinstance(value, Tensor):
        # A recording has a tensor without dims instead of a float.
        found[place] = (float,) if value.dim() == 0 else (type(value), value.dim())
    elif isinstance(value, _CHOICES):
        found[place] = value
    elif type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        _add_choices(found, place, value.item(), 0)
    elif isinstance(value, float):
        found[place] = _sign(value)
    elif isinstance(value, dict | list | tuple | set | frozenset) and depth:
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        found[place] = type(value), len(value)
        for key, part in itertools.islice(pairs, _MAX_ENTRIES):
            _add_choices(found, f"{place}[{key!r}]", part, depth - 1)
    else:
        found[place] = (type(value),)


def _sign(value: float) -> tuple[type, int]:
    """Of a float, which may change at every step, whether it is zero."""
    return float, (value > 0) - (value < 0)


def _add_held(found: dict[str, Hashable], place: str, held: Mapping[str, Any]) -> None:
    """Add the choices among attributes or variables."""
    for name, value in held.items():
        if isinstance(value, _CHOICES):
            found[f"{place}.{name}"] = value
        elif isinstance(value, float):
            found[f"{place}.{name}"] = _sign(value)


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
        site = trace.nodes[name]
        infer = {**site["infer"], **cast("dict[str, Any]", fields.get("infer", {}))}
        changed.nodes[name] = {**site, **fields, "infer": infer}
    return changed


def entered(*handlers: AbstractContextManager[object] | None) -> ExitStack:
    """Enter the handlers that there are, the first one outermost."""
    stack = ExitStack()
    for handler in handlers:
        if handler is not None:
            stack.enter_context(handler)
    return stack
