"""Numbers with errors, and tables of them, as text."""

from __future__ import annotations

import math
import shutil
import textwrap
from collections.abc import Sequence


def number(value: float, error: float) -> str:
    """
    A number with as many digits as its error allows.

    Example::

        >>> number(-22.9712, 0.0613), number(-1234.56, 7.0), number(1.0, 0.0)
        ('-22.971 ± 0.061', '-1234.6 ± 7.0', '1.0000 ± 0.0000')
    """
    digits = 4
    if error > 0 and math.isfinite(error):
        digits = min(4, max(0, 1 - math.floor(math.log10(error))))
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """
    Rows below a head, the first column to the left.

    Example::

        >>> print(table([["a", "b"], ["one", "2.0"]]))
        a      b
        ---  ---
        one  2.0
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(w) if i else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def filled(text: str, head: str = "") -> str:
    """A text in lines of the terminal's width, 100 characters at most, beside a head."""
    width = min(100, max(40, shutil.get_terminal_size((100, 24)).columns))
    head, indent = (f"{head}  ", " " * (len(head) + 2)) if head else ("", "")
    return textwrap.fill(
        text,
        width,
        initial_indent=head,
        subsequent_indent=indent,
        # Numbers and code are copied.
        break_long_words=False,
        break_on_hyphens=False,
    )
