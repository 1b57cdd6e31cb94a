"""Which line of the user's code is being run."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from types import CodeType, FrameType

import pyro
import torch

__all__ = ["is_library", "program_line"]

_ROOM = os.path.dirname(__file__)
_LIBRARIES = tuple(
    os.path.dirname(path) + os.sep
    for path in (torch.__file__, pyro.__file__, _ROOM, sysconfig.__file__)
)
_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")})

# Of Python's prompt, and of what exec runs.
_TYPED_IN = "<stdin>", "<string>"


def is_library(code: CodeType) -> bool:
    """Whether a function is Python's own, or of an installed package, PyTorch's, Pyro's or ours."""
    name = code.co_filename
    return name not in _TYPED_IN and name.startswith((*_LIBRARIES, *_INSTALLED, "<"))


def program_line(frame: FrameType | None = None) -> str:
    """The innermost line of the user's code that is being run, as ``file:line, code``."""
    frame = innermost = frame or sys._getframe(1)
    while frame is not None and is_library(frame.f_code):
        frame = frame.f_back
    # A test of ours, or an objective alone: some line is better than none.
    found = frame or innermost
    name, line = found.f_code.co_filename, found.f_lineno
    return f"{name}:{line}, {linecache.getline(name, line).strip()}"
