"""Progress of long computations: a bar by ``tqdm``, or lines in the log."""

from __future__ import annotations

import logging
import time
from typing import Any

from pyro_mcvae.ops.checks import check_flag

_logger = logging.getLogger(__name__)

# Seconds before a bar appears by default, and between lines of the log where there is no terminal.
_PATIENCE, _EVERY = 2.0, 60.0


class Progress:
    """
    A progress bar whose total may grow.

    :param str text: the label.
    :param show: True shows a bar. None shows a bar on a terminal or in a notebook, after two
        seconds, and logs a line per minute elsewhere. False shows nothing.
    :raises ValueError: for another ``show``.
    """

    def __init__(self, text: str, show: bool | None = None, unit: str = "it") -> None:
        check_flag("progress", show, or_none=True)
        from tqdm.auto import tqdm  # which Pyro needs

        # None disables the bar if the output is not a terminal.
        disable = None if show is None else not show
        delay = 0 if show else _PATIENCE
        self._bar: Any = tqdm(
            desc=text, total=0, leave=False, unit=unit, disable=disable, delay=delay
        )
        self._text, self._done = text, 0.0
        self._next = time.monotonic() + _EVERY if show is None and self._bar.disable else None

    def expect(self, count: float) -> None:
        """Increase the total."""
        self._bar.total += count

    def step(self, count: float = 1) -> None:
        """Advance the bar, or log a line if a minute has passed."""
        self._bar.update(count)
        self._done += count
        if self._next is not None and time.monotonic() > self._next:
            self._next = time.monotonic() + _EVERY
            _logger.warning("%s: %.0f %% done", self._text, 100 * self._done / self._bar.total)

    def describe(self, text: str) -> None:
        """Set the text next to the bar."""
        self._bar.set_postfix_str(text, refresh=False)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()
