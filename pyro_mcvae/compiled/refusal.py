"""Why a step cannot be recorded, and the line at which it showed."""

from __future__ import annotations

from pyro_mcvae.programs.source_lines import program_line

__all__ = ["NotRecordable", "said_by"]


class NotRecordable(BaseException):
    """
    A step does what no recording can repeat.

    Not an ``Exception``: programs, and checks of them, catch these and go on, and what was read
    until then would be taken for a constant.
    """


def said_by(error: BaseException) -> str:
    """An error in one line, with the program's line that it comes from."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    lines = str(error).strip().splitlines() or [""]
    at = f" at {program_line(trace.tb_frame)}" if trace is not None else ""
    return f"{type(error).__name__}: {lines[0]}{at}"
