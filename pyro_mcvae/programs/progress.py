"""Progress bars of long computations, by ``tqdm``."""

from __future__ import annotations

from typing import Any

from pyro_mcvae.ops.checks import check_flag

# Seconds before a bar appears by default.
_PATIENCE = 2.0


class Progress:
    """
    A progress bar whose total may grow.

    :param str text: the label.
    :param show: True for a bar; None for one on a terminal or in a notebook, after two seconds;
        False for none.
    :raises ValueError: for another ``show``.
    """

    def __init__(self, text: str, show: bool | None = None, unit: str = "it") -> None:
        check_flag("progress", show, or_none=True)
        from tqdm.auto import tqdm  # which Pyro needs

        # Disabled by None: where the output is no terminal.
        disable = None if show is None else not show
        delay = 0 if show else _PATIENCE
        self._bar: Any = tqdm(
            desc=text, total=0, leave=False, unit=unit, disable=disable, delay=delay
        )

    def expect(self, count: float) -> None:
        """Increase the total."""
        self._bar.total += count

    def step(self, count: float = 1) -> None:
        """Advance the bar."""
        self._bar.update(count)

    def describe(self, text: str) -> None:
        """Set the text beside the bar."""
        self._bar.set_postfix_str(text, refresh=False)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()
