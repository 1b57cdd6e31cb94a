"""Which functions a step executes: only what these read can matter to it."""

from __future__ import annotations

import datetime
import gc
import io
import os
import sys
import time
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FrameType

from pyro_mcvae.programs.source_lines import is_core, is_generated, program_line

_CLOCKS = {getattr(time, name) for name in dir(time) if callable(getattr(time, name))}
# What has another result at another time.
_ENVIRONMENT = type(os.environ).__getitem__.__code__
_OUTER = {
    **dict.fromkeys(_CLOCKS, "reads the clock"),
    datetime.datetime.now: "reads the clock",
    datetime.datetime.utcnow: "reads the clock",
    datetime.datetime.today: "reads the clock",
    datetime.date.today: "reads the clock",
    **dict.fromkeys((io.open, os.open), "reads a file"),
}


class ExecutedCode:
    """
    The code of all functions that are called inside a ``with`` statement.

    :ivar codes: by id; None if something else watches calls, a profiler say.
    :ivar variables: of the environment, which programs have read.
    :ivar outer: what they read that has another value at another time, by the functions that read
        it, with the line.
    """

    def __init__(self) -> None:
        self.codes: dict[int, CodeType] | None = {}
        self.variables: set[str] = set()
        self.outer: dict[int, str] = {}
        self._names: frozenset[str] | None = None

    def __enter__(self) -> ExecutedCode:
        self._free = sys.getprofile() is None
        # What others do when garbage is collected is no part of a program.
        self._collects = gc.isenabled()
        gc.disable()
        if self._free and self.codes is not None:
            self._names = None
            sys.setprofile(self._called)
        else:
            self.codes = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._free:
            sys.setprofile(None)
        if self._collects:
            gc.enable()

    def _called(self, frame: FrameType, event: str, function: object) -> None:
        if event == "call":
            assert self.codes is not None
            code = frame.f_code
            if code is _ENVIRONMENT and any(not is_core(f.f_code) for f in _callers(frame, 3)):
                self.variables.add(frame.f_locals["key"])
            if id(code) not in self.codes and not is_generated(frame):
                self.codes[id(code)] = code
        elif event == "c_call" and function in _OUTER and not is_core(frame.f_code):
            name = getattr(function, "__name__", "")
            why = f"{_OUTER[function]} ({name}) at {program_line(frame)}"
            self.outer |= {id(f.f_code): why for f in (frame, *_callers(frame, 50))}

    def has(self, code: CodeType) -> bool:
        """Whether a function was executed, as far as is known."""
        return self.codes is None or id(code) in self.codes

    def add(self, other: ExecutedCode) -> None:
        """Count what the other has executed."""
        if self.codes is not None:
            self.codes |= other.codes or {}
            self._names = None

    @property
    def core_names(self) -> frozenset[str]:
        """What the executed functions of Python, PyTorch, Pyro and this package name."""
        if self._names is None:
            codes = (code for code in (self.codes or {}).values() if is_core(code))
            self._names = frozenset(names_of(*codes))
        return self._names


def _callers(frame: FrameType, count: int) -> Iterator[FrameType]:
    """Who has called a function, the next ones first."""
    caller = frame.f_back
    while caller is not None and count:
        yield caller
        caller, count = caller.f_back, count - 1


def names_of(*codes: CodeType, strings: bool = True) -> dict[str, None]:
    """
    The globals and attributes that functions name, and those within them.

    :param strings: count what they have as strings, too, for ``getattr``.
    """
    found: dict[str, None] = {}
    for code in codes:
        found.update(_names(code, strings))
    return found


@lru_cache(maxsize=8192)
def _names(code: CodeType, strings: bool) -> dict[str, None]:
    found = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found.update(_names(constant, strings))
        for part in constant if isinstance(constant, tuple | frozenset) else (constant,):
            if strings and isinstance(part, str):
                found[part] = None
    return found
