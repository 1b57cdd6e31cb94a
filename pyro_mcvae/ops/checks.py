"""Check arguments, fix options at construction, and log warnings once."""

from __future__ import annotations

import inspect
import logging
import math
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar

# Checks of common arguments: counts, flags and choices.


def check_count(name: str, value: Any, least: int = 1) -> int:
    """
    Check a count.

    :returns: the count as an int; NumPy integers and integer tensors without dims are accepted.
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
    Check a choice among several strings.

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
    Check that a number is positive and finite.

    :returns: the number.
    :raises ValueError: otherwise.

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
    """Return an integer as an int; None for anything else, including bools."""
    if getattr(value, "ndim", 0) != 0 or "bool" in str(getattr(value, "dtype", type(value))):
        return None
    try:
        return operator.index(value)
    except (TypeError, RuntimeError):
        return None


def check_flag(name: str, value: Any, or_none: bool = False) -> None:
    """
    Check a flag.

    :raises ValueError: unless ``value`` is True or False (or None, if that is allowed).

    Example::

        >>> check_flag("joint", "yes")
        Traceback (most recent call last):
            ...
        ValueError: joint must be True or False, got 'yes'
    """
    if not isinstance(value, bool) and not (or_none and value is None):
        choices = "True, False or None" if or_none else "True or False"
        raise ValueError(f"{name} must be {choices}, got {value!r}")


# Options that are fixed when an object is made.

_PACKAGE = __name__.partition(".")[0]


class FixedOptions:
    """
    Base class of objects whose options are fixed at construction.

    The parts of an object depend on its options. A later assignment would change only some parts,
    or none, so it raises an error.

    :cvar _also_fixed: other attributes that are fixed, too.
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

    def _is_initialized(self) -> bool:
        """Return whether the options of the base classes have their values."""
        return True

    def __setattr__(self, name: str, value: Any) -> None:
        if name in options_of(self) and self._is_initialized() and hasattr(self, name):
            kind = type(self).__name__
            raise AttributeError(
                f"{name} of a {kind} is fixed at construction, and cannot become {value!r}: make "
                f"another one, {kind}(..., {name}={value!r})"
            )
        super().__setattr__(name, value)


def options_of(instance: object) -> frozenset[str]:
    """
    Return the names of the options of an object of this package.

    Options of user-defined subclasses are not included, because they may be read at each step.
    """
    return _options_of(type(instance))  # type: ignore[arg-type]


@cache
def _options_of(kind: type[Any]) -> frozenset[str]:
    classes = (c for c in kind.__mro__ if c.__module__.partition(".")[0] == _PACKAGE)
    inits = (vars(c)["__init__"] for c in classes if "__init__" in vars(c))
    named = (p for init in inits for p in inspect.signature(init).parameters.values())
    names = {p.name for p in named if p.kind is not p.VAR_KEYWORD}
    fixed: frozenset[str] = getattr(kind, "_also_fixed", frozenset())
    free: frozenset[str] = getattr(kind, "_assignable", frozenset())
    return frozenset((names | fixed) - free - {"self"})


# Warnings that are logged once.


class WarnOnce:
    """
    Logs each warning of one object only once.

    :param logger: the logger.

    Example::

        >>> import logging
        >>> from pyro_mcvae.ops.checks import WarnOnce
        >>> warn = WarnOnce(logging.getLogger("example"))
        >>> warn("the guide is narrow"), warn("the guide is narrow")
        (True, False)
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._logged: set[str] = set()

    def __call__(self, message: str) -> bool:
        """Log a message unless it was logged before, and return whether it was new."""
        if message in self._logged:
            return False
        self._logged.add(message)
        self._logger.warning("%s", message)
        return True


@contextmanager
def each_once() -> Iterator[None]:
    """Let the package's loggers log each line only once inside."""
    logged: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        new = text not in logged
        logged.add(text)
        return new

    loggers = list(logging.root.manager.loggerDict.items())
    ours = [v for n, v in loggers if n.startswith("pyro_mcvae") and isinstance(v, logging.Logger)]
    for logger in ours:
        logger.addFilter(is_new)
    try:
        yield
    finally:
        for logger in ours:
            logger.removeFilter(is_new)
