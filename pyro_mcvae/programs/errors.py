"""Errors that callers tell apart."""

from __future__ import annotations

import textwrap


class SiteError(ValueError):
    """Says what is wrong with a site and what to do: another attempt would not help."""


class NoCoordinateError(SiteError):
    """A guide site has neither explicit noise nor an unconstrained form."""


class NothingToMoveError(ValueError):
    """No random latent of the guide belongs to single data, so that none can be moved for one."""


class LeadingDimsError(RuntimeError):
    """
    Programs with leading dims are other ones than without, or none.

    :ivar reason: the site or the operation, and what is wrong with it, in a few words.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = textwrap.shorten(reason or message, 120, placeholder=" ...")


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its name, if it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
