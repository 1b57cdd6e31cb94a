"""What a user is told, and not told again."""

from __future__ import annotations

import logging

__all__ = ["WarnOnce"]


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
