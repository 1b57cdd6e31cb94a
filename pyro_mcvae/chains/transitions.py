"""Values of which there is one for all transitions of a chain, or one for each."""

from __future__ import annotations

from torch import Tensor

from pyro_mcvae.ops.checks import check_count

__all__ = ["begin_with", "check_transitions", "of_transition"]


def begin_with(
    name: str, start: Tensor, num_transitions: int | None, per_coordinate: bool = True
) -> Tensor:
    """
    First values: as given, or one row for each transition.

    :param start: one value for all; with ``num_transitions`` also one for each, in its first dim.
    :param bool per_coordinate: whether a last dim may hold one value for each coordinate.
    :raises ValueError: for a ``num_transitions`` that is no number, and for another shape.
    """
    most = int(per_coordinate)
    if num_transitions is None:
        if start.dim() > most:
            raise ValueError(
                f"{name} must be one value{' or one per coordinate' if most else ''}, or come with "
                f"num_transitions, got a tensor of shape {tuple(start.shape)}"
            )
        return start
    num_transitions = check_count("num_transitions", num_transitions)
    if start.dim() == 0:
        return start.repeat(num_transitions)
    if len(start) != num_transitions or start.dim() > 1 + most:
        shape = f"[{num_transitions}]" + (f" or [{num_transitions}, D]" if most else "")
        raise ValueError(
            f"{name} must be one number or a tensor of shape {shape}, one row per transition, got "
            f"shape {tuple(start.shape)}"
        )
    return start


def of_transition(
    name: str, values: Tensor, num_transitions: int | None, transition: int
) -> Tensor:
    """
    The value that a transition goes by.

    :param int transition: from 0; negative ones count from the last.
    :raises ValueError: if the chain has more transitions than there are values.
    """
    if num_transitions is None:
        return values
    if not -num_transitions <= transition < num_transitions:
        raise _too_few(name, num_transitions, f"transition {transition + 1}")
    return values[transition]


def _too_few(name: str, num_transitions: int, made: str) -> ValueError:
    return ValueError(
        f"the {name} has num_transitions={num_transitions} values, one per transition, but the "
        f"chain makes {made}: give it num_transitions=num_steps"
    )


def check_transitions(name: str, num_transitions: int | None, num_steps: int) -> None:
    """
    :raises ValueError: unless a chain of ``num_steps`` transitions has a value for each.
    """
    if num_transitions is not None and num_transitions != num_steps:
        raise _too_few(name, num_transitions, f"num_steps={num_steps}")
