"""Why a step cannot be recorded, and the line at which it showed."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from types import CodeType, FrameType

import pyro
import torch

__all__ = ["NotRecordable", "is_library", "program_line", "said_by"]

_PACKAGE = os.path.dirname(__file__)
_LIBRARIES = tuple(
    os.path.dirname(path) + os.sep
    for path in (torch.__file__, pyro.__file__, _PACKAGE, sysconfig.__file__)
)
_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")})


class NotRecordable(BaseException):
    """
    A step does what no recording can repeat.

    Not an ``Exception``: programs, and checks of them, catch these and go on, and what was read
    until then would be taken for a constant.
    """


def is_library(code: CodeType) -> bool:
    """Whether a function is Python's own, or of an installed package, PyTorch's, Pyro's or ours."""
    return code.co_filename.startswith((*_LIBRARIES, *_INSTALLED, "<"))


def program_line(frame: FrameType | None = None) -> str:
    """The innermost line of the user's code that is being run, as ``file:line, code``."""
    frame = innermost = frame or sys._getframe(1)
    while frame is not None and is_library(frame.f_code):
        frame = frame.f_back
    # A test of ours, or an objective alone: some line is better than none.
    found = frame or innermost
    name, line = found.f_code.co_filename, found.f_lineno
    return f"{name}:{line}, {linecache.getline(name, line).strip()}"


def said_by(error: BaseException) -> str:
    """An error in one line, with the program's line that it comes from."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    lines = str(error).strip().splitlines() or [""]
    at = f" at {program_line(trace.tb_frame)}" if trace is not None else ""
    return f"{type(error).__name__}: {lines[0]}{at}"
