"""Time of long calls: their progress, and their budget."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from pyro_mcvae.ops.checks import check_positive

_logger = logging.getLogger(__name__)

# Seconds between lines of progress, which is also the time left above which a line announces it.
_LINE = 10.0
# Seconds until a progress bar appears.
_DELAY = 2
now = time.monotonic


class OutOfTimeError(TimeoutError):
    """The time budget ended before anything was known."""


class Clock:
    """
    The time of one call, which its loops consult.

    A loop opens a :class:`Stage` and counts its units of work. On a terminal and in notebooks this
    moves a progress bar. Elsewhere it logs one line every ten seconds. A loop that can return early
    does so when :attr:`expired` is True.

    :param str call: the name of the function that was called.
    :param show: True shows the bar. None shows it on a terminal or in a notebook, and logs lines
        elsewhere. False does neither.
    :param budget: the time budget in seconds; None for no limit.
    """

    def __init__(self, call: str, show: bool | None = None, budget: float | None = None) -> None:
        from tqdm.auto import tqdm  # which Pyro needs

        self.call = call
        self.budget = math.inf if budget is None else check_positive("time_budget", budget)
        self._began = self.last_line = now()
        self._deadline = self._began + self.budget
        hidden = show is False or (show is None and "TQDM_DISABLE" in os.environ)
        delay = 0 if show else _DELAY
        disable = hidden or (None if show is None else False)
        self.bar = tqdm(desc=call, total=0, leave=False, disable=disable, delay=delay)
        self.logs = show is None and not hidden and bool(self.bar.disable)

    def __enter__(self) -> Clock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.bar.close()

    @property
    def limited(self) -> bool:
        """Return whether there is a budget."""
        return math.isfinite(self.budget)

    @property
    def expired(self) -> bool:
        """Return whether the budget, or the part of it that the caller may use, has ended."""
        return self.limited and now() >= self._deadline

    @contextmanager
    def until(self, part: float) -> Iterator[None]:
        """
        End the budget of the loops inside earlier.

        :param float part: the end, as a part of the whole budget.
        """
        deadline = self._deadline
        if self.limited:
            self._deadline = min(deadline, self._began + part * self.budget)
        try:
            yield
        finally:
            self._deadline = deadline

    def stage(self, text: str, total: float, unit: str) -> Stage:
        """
        Return a part of the work.

        :param str text: what is done.
        :param float total: the number of its units.
        :param str unit: the name of a unit, in the plural.
        """
        self.bar.total += total
        return Stage(self, text, total, unit)

    def warn(self, text: str) -> None:
        """Log what the budget left out."""
        _logger.warning("%s: time_budget=%g ended, with %s", self.call, self.budget, text)


class Stage:
    """A part of the work of a call; see :meth:`Clock.stage`."""

    def __init__(self, clock: Clock, text: str, total: float, unit: str) -> None:
        self.clock, self.text, self.total, self.unit = clock, text, total, unit
        self.done, self._announced = 0.0, False
        self._began = self._before = now()

    def advance(self, count: float = 1) -> None:
        """Count units that are done, and log a line if one is due."""
        clock = self.clock
        self.done += count
        clock.bar.update(count)
        if not clock.logs:
            return
        time_now = now()
        spent = time_now - self._began
        # The first units may be slow, because they analyze the programs.
        rate = min(spent / max(self.done, 1e-9), (time_now - self._before) / max(count, 1e-9))
        left = rate * max(0.0, self.total - self.done)
        self._before = time_now
        is_long = not self._announced and spent >= 1.0 and left > _LINE
        if is_long or time_now - clock.last_line >= _LINE:
            clock.last_line, self._announced = time_now, True
            _logger.warning(
                "%s: %s, %.0f of %.0f %s after %.0f s, about %.0f s left",
                *(clock.call, self.text, self.done, self.total, self.unit, spent, left),
            )

    def check(self) -> None:
        """
        Stop work that is worth nothing before it is complete.

        :raises OutOfTimeError: after the budget.
        """
        if self.clock.expired:
            raise OutOfTimeError(
                f"{self.clock.call}: time_budget={self.clock.budget:g} ended in {self.text}, after "
                f"{self.done:.0f} of {self.total:.0f} {self.unit}, and nothing is known yet. Use a "
                f"larger budget, or fewer of them"
            )
