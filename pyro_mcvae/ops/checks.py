"""Checks of arguments that have one answer for all: counts and flags."""

from __future__ import annotations

from typing import Any

__all__ = ["check_count", "check_flag"]


def check_count(name: str, value: Any, least: int = 1) -> None:
    """
    Check a number of things.

    :raises ValueError: unless ``value`` is an int of at least ``least``.

    Example::

        >>> check_count("num_steps", 0)
        Traceback (most recent call last):
            ...
        ValueError: num_steps must be an int of at least 1, got 0
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an int of at least {least}, got {value!r}")


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
