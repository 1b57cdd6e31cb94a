"""The progress of long work: a bar where ``tqdm`` shows one, else a line per minute in the log."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Sized
from types import TracebackType
from typing import Any

from pyro_mcvae.ops.checks import check_flag

__all__ = ["Progress", "shown"]

_logger = logging.getLogger(__name__)

# Seconds before a bar that nobody asked for is seen, and between two lines of a log.
_PATIENCE, _MINUTE = 2.0, 60.0


class Progress:
    """
    A bar of work whose amount may grow on the way.

    :param str text: what is done.
    :param show: True for a bar; None for one on a terminal or in a notebook, after two seconds, and
        elsewhere a line per minute in the log; False for neither.
    :raises ValueError: for another ``show``.
    """

    def __init__(self, text: str, show: bool | None = None, unit: str = "it") -> None:
        check_flag("progress", show, or_none=True)
        self._bar = None if show is False else _bar(text, show, unit)
        shown = self._bar is not None and not getattr(self._bar, "disable", False)
        self._text, self._unit, self._now = text, unit, ""
        self._total = self._done = 0.0
        self._began = time.monotonic()
        self._next = math.inf if shown or show is False else self._began + _MINUTE

    def expect(self, count: float) -> None:
        """There is more to do."""
        self._total += count
        if self._bar is not None:
            self._bar.total = self._total

    def step(self, count: float = 1) -> None:
        """So much is done."""
        self._done += count
        if self._bar is not None:
            self._bar.update(count)
        if (now := time.monotonic()) >= self._next:
            self._next = now + _MINUTE
            # A line that tells a user that work goes on is seen where nobody has set a level.
            level = logging.INFO if _logger.isEnabledFor(logging.INFO) else logging.WARNING
            _logger.log(
                level,
                "%s%s: %.0f of %.0f %ss after %.0f minutes",
                self._text,
                f" {self._now}" if self._now else "",
                self._done,
                self._total,
                self._unit,
                (now - self._began) / 60,
            )

    def say(self, text: str) -> None:
        """What is being done now."""
        self._now = text
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def _bar(text: str, show: bool | None, unit: str) -> Any:
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return None
    # Disabled by None: where the output is no terminal.
    return tqdm(
        desc=text,
        total=0,
        leave=False,
        unit=unit,
        disable=False if show else None,
        delay=0 if show else _PATIENCE,
    )


def shown(
    items: Iterable[object], text: str, show: bool | None, unit: str = "it"
) -> Iterator[object]:
    """The items, with a bar."""
    with Progress(text, show, unit) as bar:
        if isinstance(items, Sized):
            bar.expect(len(items))
        for item in items:
            yield item
            bar.step()
