"""Find the line of the user's code that is being executed."""

from __future__ import annotations

import inspect
import linecache
import os
import sys
import sysconfig
from types import CodeType, FrameType

import pyro
import torch

_SUBPACKAGE = os.path.dirname(__file__)
_PACKAGE, *_LIBRARIES, _PYTHON = (
    os.path.dirname(path) + os.sep
    for path in (_SUBPACKAGE, *map(inspect.getfile, (torch, pyro, sysconfig)))
)
_CORE = (_PACKAGE, *_LIBRARIES)
_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")})

# File names of code from prompts, doctests and exec.
_TYPED_IN = "<stdin>", "<string>", "<ipython-input", "<python-input", "<console>", "<doctest"


def is_core(code: CodeType) -> bool:
    """Return whether a function belongs to Python, PyTorch, Pyro or this package."""
    return is_core_file(code.co_filename)


def is_own(code: CodeType) -> bool:
    """Return whether a function belongs to this package."""
    return code.co_filename.startswith(_PACKAGE)


def is_library(code: CodeType) -> bool:
    """Return whether a function is core, or in an installed package (possibly the program's)."""
    return is_library_file(code.co_filename)


def is_library_file(name: str) -> bool:
    """Return whether a file is core, or in an installed package."""
    return is_core_file(name) or name.startswith(_INSTALLED)


def is_core_file(name: str) -> bool:
    if name.startswith(_INSTALLED):
        return name.startswith(_CORE)
    return not name.startswith(_TYPED_IN) and name.startswith((*_CORE, _PYTHON, "<"))


def is_generated(frame: FrameType) -> bool:
    """Return whether a library generated the code of a function, as ``dataclasses`` does."""
    if not frame.f_code.co_filename.startswith(_TYPED_IN):
        return False
    name = str(frame.f_globals.get("__name__", "__main__"))
    path = getattr(sys.modules.get(name), "__file__", None)
    return name.startswith("namedtuple_") or (path is not None and is_library_file(path))


def in_assertion(frame: FrameType) -> bool:
    """Return whether a frame is at an ``assert``, which stops a program or has no effect."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return line.lstrip().startswith("assert ")


def program_line(frame: FrameType | None = None) -> str:
    """Return the innermost line of the running program, as ``file:line, code``."""
    begin = frame or sys._getframe(1)
    innermost = _innermost(begin)
    if innermost is None:
        return "the backward pass, no line of the programs"
    return f"{innermost.f_code.co_filename}:{innermost.f_lineno}, {_source(innermost)}"


def _source(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()


def _is_unknown(frame: FrameType) -> bool:
    """Return whether a frame has no source line, for example in generated code."""
    return frame.f_code.co_filename.startswith("<") and not _source(frame)


def _innermost(begin: FrameType) -> FrameType | None:
    frame: FrameType | None = begin
    installed = None
    while frame is not None and (is_library(frame.f_code) or _is_unknown(frame)):
        if installed is None and not is_core(frame.f_code) and not _is_unknown(frame):
            installed = frame
        if installed is not None and frame.f_code.co_filename.startswith(_PACKAGE):
            return installed  # the program is in a package, and the next frames called us
        if frame.f_code.co_filename == torch.autograd.__file__:
            return None
        frame = frame.f_back
    # A test of this package: some line is better than none.
    return frame or installed or begin
