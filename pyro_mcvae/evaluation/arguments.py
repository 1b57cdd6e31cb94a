"""The arguments of a pair of programs, made of a batch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from pyro_mcvae.programs.execution import Programs

__all__ = ["as_arguments", "as_device", "check_call", "check_function"]


def as_arguments(
    batch: object, device: torch.device | None = None
) -> tuple[tuple[object, ...], dict[str, object]]:
    """
    Positional and keyword arguments: those of a tuple or a list, of a mapping, or a single one.

    :param device: where to move the tensors, if anywhere.
    :raises ValueError: for None.
    """
    if batch is None:
        raise ValueError(
            "a batch, or what to_args makes of it, is None: return the programs' arguments, as a "
            "tuple, a dict of keyword arguments, or the only one"
        )
    if device is not None:
        batch = tree_map_only(Tensor, lambda t: t.to(device), batch)
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})


def as_device(device: torch.device | str | int | None) -> torch.device | None:
    """
    A device, if one is given.

    :raises ValueError: for what is none.
    """
    try:
        return None if device is None else torch.device(device)
    except (TypeError, RuntimeError) as error:
        raise ValueError(
            f"device must be a torch.device, or what one is made of, such as 'cuda', got {device!r}"
        ) from error


def check_function(name: str, value: object) -> None:
    """Raise a ValueError unless ``value`` is a function, or None."""
    if value is not None and not callable(value):
        raise ValueError(f"{name} must be a function or None, got {value!r}")


def check_call(programs: Programs) -> None:
    """
    Check that a batch can be the programs' arguments.

    :raises ValueError: naming what a program says of arguments that it does not take.
    """
    args, kwargs = programs.args, programs.kwargs
    for role, program in (("model", programs.model), ("guide", programs.guide)):
        target = program.forward if isinstance(program, nn.Module) else program
        try:
            # What is wrapped may be called with other arguments.
            signature = inspect.signature(target, follow_wrapped=False)
        except (TypeError, ValueError):
            continue
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            given = [type(a).__name__ for a in args] + [
                f"{n}={type(v).__name__}" for n, v in kwargs.items()
            ]
            example = "(batch,)" if kwargs else "(batch[0],)"
            raise ValueError(
                f"the {role} cannot be called with a batch, whose entries are its arguments "
                f"({', '.join(given)}): {error}. Pass to_args=..., which makes the arguments of a "
                f"batch, such as to_args=lambda batch: {example}"
            ) from error
