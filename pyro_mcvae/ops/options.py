"""Options that are given when an object is made, and cannot be assigned afterwards."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, ClassVar

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
        AttributeError: num_steps of a LinearSchedule is settled when it is made, and cannot ...
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
                f"{name} of a {kind} is settled when it is made, and cannot become {value!r}: make "
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
