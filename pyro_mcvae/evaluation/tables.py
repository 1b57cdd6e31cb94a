"""Numbers with errors, and tables of them, as text."""

from __future__ import annotations

import math
import shutil
import textwrap
from collections.abc import Sequence

from torch import Tensor


def number(value: float, error: float) -> str:
    """
    Format a number with as many digits as its error allows; NaN is an unknown error.

    Example::

        >>> number(-22.9712, 0.0613), number(-1234.56, 7.0), number(1.0, 0.0)
        ('-22.971 ± 0.061', '-1234.6 ± 7.0', '1.0000 ± 0.0000')
    """
    if math.isnan(error):
        return f"{value:.3f} ± unknown"
    digits = 4
    if error > 0 and math.isfinite(error):
        digits = min(4, max(0, 1 - math.floor(math.log10(error))))
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """
    Format rows below a header, with the first column left-aligned.

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


def filled(text: str) -> str:
    """Wrap a text at the terminal's width, at most 100 characters."""
    width = min(100, max(40, shutil.get_terminal_size((100, 24)).columns))
    # Numbers and code are copied.
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


def fraction(flags: Tensor) -> float:
    """Return the fraction of weights for which a flag is true."""
    return float(flags.double().mean())
