"""What a user is told, and not told again."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class WarnOnce:
    """
    Warnings of one object, each of which is logged the first time only.

    :param logger: where.

    Example::

        >>> import logging
        >>> from pyro_mcvae.ops.notices import WarnOnce
        >>> warn = WarnOnce(logging.getLogger("example"))
        >>> warn("the guide is narrow"), warn("the guide is narrow")
        (True, False)
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._told: set[str] = set()

    def __call__(self, message: str) -> bool:
        """Log it, unless it was logged before; whether it was new."""
        if message in self._told:
            return False
        self._told.add(message)
        self._logger.warning("%s", message)
        return True


@contextmanager
def each_once() -> Iterator[None]:
    """Let the package's loggers say each line once inside, however often programs are inspected."""
    told: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        new = text not in told
        told.add(text)
        return new

    known = list(logging.root.manager.loggerDict.items())
    own = [v for n, v in known if n.startswith("pyro_mcvae") and isinstance(v, logging.Logger)]
    for logger in own:
        logger.addFilter(is_new)
    try:
        yield
    finally:
        for logger in own:
            logger.removeFilter(is_new)
