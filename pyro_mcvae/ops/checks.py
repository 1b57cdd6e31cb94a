"""Checks of arguments that have one answer for all: counts, flags and choices."""

from __future__ import annotations

import math
import operator
from typing import Any


def check_count(name: str, value: Any, least: int = 1) -> int:
    """
    Check a number of things.

    :returns: the number; integers of NumPy and integer tensors without dims are numbers too.
    :raises ValueError: unless ``value`` is an int of at least ``least``.

    Example::

        >>> check_count("num_steps", 0)
        Traceback (most recent call last):
            ...
        ValueError: num_steps must be an int of at least 1, got 0
    """
    count = as_int(value)
    if count is None or count < least:
        raise ValueError(f"{name} must be an int of at least {least}, got {value!r}")
    return count


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """
    Check a choice between several.

    :raises ValueError: unless ``value`` is one of them.

    Example::

        >>> check_choice("backend", "none", ("eager", "inductor"))
        Traceback (most recent call last):
            ...
        ValueError: backend must be one of eager, inductor, got 'none'
    """
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def check_positive(name: str, value: Any) -> float:
    """
    Check a number that is to be positive and finite.

    :returns: the number.
    :raises ValueError: unless it is.

    Example::

        >>> check_positive("seconds", 0)
        Traceback (most recent call last):
            ...
        ValueError: seconds must be a positive number, got 0
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive number, got {value!r}")
    return float(value)


def as_int(value: Any) -> int | None:
    """A whole number as an int; None for anything else, bools among them."""
    if getattr(value, "ndim", 0) != 0 or "bool" in str(getattr(value, "dtype", type(value))):
        return None
    try:
        return operator.index(value)
    except (TypeError, RuntimeError):
        return None


def check_flag(name: str, value: Any, or_none: bool = False) -> None:
    """
    Check a choice between two.

    :raises ValueError: unless ``value`` is True or False (or None, if that is allowed).

    Example::

        >>> check_flag("joint", "yes")
        Traceback (most recent call last):
            ...
        ValueError: joint must be True or False, got 'yes'
    """
    if not isinstance(value, bool) and not (or_none and value is None):
        known = "True, False or None" if or_none else "True or False"
        raise ValueError(f"{name} must be {known}, got {value!r}")
