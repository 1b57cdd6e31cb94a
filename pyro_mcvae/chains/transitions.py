"""Values of which there is one for all transitions of a chain, or one for each."""

from __future__ import annotations

from torch import Tensor, nn

from pyro_mcvae.ops.checks import check_count


def begin_with(start: Tensor, num_transitions: int | None) -> Tensor:
    """Return first values: as given, or one row for each transition."""
    if num_transitions is None:
        return start
    return start.expand(check_count("num_transitions", num_transitions), *start.shape).clone()


def of_transition(
    name: str, values: Tensor, num_transitions: int | None, transition: int
) -> Tensor:
    """
    Return the value of a transition.

    :param int transition: from 0; negative ones count from the last.
    :raises ValueError: if the chain has more transitions than there are values.
    """
    if num_transitions is None:
        return values
    if transition >= num_transitions:
        raise _too_few(name, num_transitions, f"transition {transition + 1}")
    return values[transition]


def check_transitions(name: str, num_transitions: int | None, num_steps: int) -> None:
    """
    :raises ValueError: unless a chain of ``num_steps`` transitions has a value for each.
    """
    if num_transitions is not None and num_transitions != num_steps:
        raise _too_few(name, num_transitions, f"num_steps={num_steps}")


def _too_few(name: str, num_transitions: int, made: str) -> ValueError:
    return ValueError(
        f"the {name} has num_transitions={num_transitions} values, one per transition, but the "
        f"chain makes {made}: give it num_transitions=num_steps"
    )


def no_value(part: nn.Module, value: object, wanted: str) -> ValueError:
    """The error of a module of one's own that returns something else than a tensor it should."""
    found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    return ValueError(f"{type(part).__name__}.forward must return a tensor {wanted}, got {found}")
