"""Checks of arguments, options that stay fixed, and warnings that are given once."""

from __future__ import annotations

import inspect
import logging
import math
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar

# Checks of arguments that have one answer for all: counts, flags and choices.


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


# Options that are given when an object is made, and cannot be assigned afterwards.

_PACKAGE = __name__.partition(".")[0]


class FixedOptions:
    """
    Base class of objects whose options are fixed when they are made.

    The parts of an object are made for its options. An option that is assigned later would reach
    only some of them, or none, so that assigning one is an error.

    :cvar _also_fixed: attributes that are no arguments, and fixed too.
    :cvar _assignable: options that may be assigned, because all parts read them at each use.

    Example::

        >>> from pyro_mcvae import LinearSchedule
        >>> LinearSchedule(4).num_steps = 8  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        AttributeError: num_steps of a LinearSchedule is fixed at construction, and cannot ...
    """

    _also_fixed: ClassVar[frozenset[str]] = frozenset()
    _assignable: ClassVar[frozenset[str]] = frozenset()

    def _is_made(self) -> bool:
        """Return whether the options of the base classes have their values."""
        return True

    def __setattr__(self, name: str, value: Any) -> None:
        if name in options_of(self) and self._is_made() and hasattr(self, name):
            kind = type(self).__name__
            raise AttributeError(
                f"{name} of a {kind} is fixed at construction, and cannot become {value!r}: make "
                f"another one, {kind}(..., {name}={value!r})"
            )
        super().__setattr__(name, value)


def options_of(made: object) -> frozenset[str]:
    """
    Return the names of the options that an object of this package is made with.

    Those of users' own subclasses are theirs: they may read them at each step.
    """
    return _options_of(type(made))  # type: ignore[arg-type]


@cache
def _options_of(kind: type[Any]) -> frozenset[str]:
    own = (c for c in kind.__mro__ if c.__module__.partition(".")[0] == _PACKAGE)
    inits = (vars(c)["__init__"] for c in own if "__init__" in vars(c))
    named = (p for init in inits for p in inspect.signature(init).parameters.values())
    names = {p.name for p in named if p.kind is not p.VAR_KEYWORD}
    fixed: frozenset[str] = getattr(kind, "_also_fixed", frozenset())
    free: frozenset[str] = getattr(kind, "_assignable", frozenset())
    return frozenset((names | fixed) - free - {"self"})


# What a user is told, and not told again.


class WarnOnce:
    """
    Warnings of one object, each of which is logged the first time only.

    :param logger: where.

    Example::

        >>> import logging
        >>> from pyro_mcvae.ops.checks import WarnOnce
        >>> warn = WarnOnce(logging.getLogger("example"))
        >>> warn("the guide is narrow"), warn("the guide is narrow")
        (True, False)
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._told: set[str] = set()

    def __call__(self, message: str) -> bool:
        """Log it, unless it was logged before; whether it was new."""
        if message in self._told:
            return False
        self._told.add(message)
        self._logger.warning("%s", message)
        return True


@contextmanager
def each_once() -> Iterator[None]:
    """Let the package's loggers say each line once inside, however often programs are inspected."""
    told: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        new = text not in told
        told.add(text)
        return new

    known = list(logging.root.manager.loggerDict.items())
    own = [v for n, v in known if n.startswith("pyro_mcvae") and isinstance(v, logging.Logger)]
    for logger in own:
        logger.addFilter(is_new)
    try:
        yield
    finally:
        for logger in own:
            logger.removeFilter(is_new)
