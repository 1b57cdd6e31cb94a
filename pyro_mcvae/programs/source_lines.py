"""Find the line of the user's code that is executed."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from types import CodeType, FrameType

import pyro
import torch

_ROOM = os.path.dirname(__file__)
_OURS, *_THEIRS, _PYTHON = (
    os.path.dirname(path) + os.sep
    for path in (_ROOM, torch.__file__, pyro.__file__, sysconfig.__file__)
)
_CORE = (_OURS, *_THEIRS)
_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")})

# Of prompts, of doctests, and of what exec runs.
_TYPED_IN = "<stdin>", "<string>", "<ipython-input", "<python-input", "<console>", "<doctest"


def is_core(code: CodeType) -> bool:
    """Whether a function is Python's own, PyTorch's, Pyro's or ours: no part of a program."""
    return is_core_file(code.co_filename)


def is_library(code: CodeType) -> bool:
    """As :func:`is_core`, or of an installed package, which may be that of a program."""
    return _is_library_file(code.co_filename)


def _is_library_file(name: str) -> bool:
    """Whether the functions of a file are."""
    return is_core_file(name) or name.startswith(_INSTALLED)


def is_core_file(name: str) -> bool:
    if name.startswith(_INSTALLED):
        return name.startswith(_CORE)
    return not name.startswith(_TYPED_IN) and name.startswith((*_CORE, _PYTHON, "<"))


def is_generated(frame: FrameType) -> bool:
    """Whether a library has made the code of a function, as dataclasses do, which is no program."""
    if not frame.f_code.co_filename.startswith(_TYPED_IN):
        return False
    name = str(frame.f_globals.get("__name__", "__main__"))
    path = getattr(sys.modules.get(name), "__file__", None)
    return name.startswith("namedtuple_") or (path is not None and _is_library_file(path))


def in_assertion(frame: FrameType) -> bool:
    """Whether a frame is at an ``assert``, which stops a program or changes nothing."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return line.lstrip().startswith("assert ")


def program_line(frame: FrameType | None = None) -> str:
    """The innermost line of the program that is being run, as ``file:line, code``."""
    begin = frame or sys._getframe(1)
    found = _innermost(begin)
    if found is None:
        return "the backward pass, no line of the programs"
    return f"{found.f_code.co_filename}:{found.f_lineno}, {_source(found)}"


def _source(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()


def _is_unknown(frame: FrameType) -> bool:
    """Whether there is no line to name, as of code that a library has made."""
    return frame.f_code.co_filename.startswith("<") and not _source(frame)


def _innermost(begin: FrameType) -> FrameType | None:
    frame: FrameType | None = begin
    installed = None
    while frame is not None and (is_library(frame.f_code) or _is_unknown(frame)):
        if installed is None and not is_core(frame.f_code) and not _is_unknown(frame):
            installed = frame
        if installed is not None and frame.f_code.co_filename.startswith(_OURS):
            return installed  # the program is a package's, and what follows called us
        if frame.f_code.co_filename == torch.autograd.__file__:
            return None
        frame = frame.f_back
    # A test of ours, or an objective alone: some line is better than none.
    return frame or installed or begin
