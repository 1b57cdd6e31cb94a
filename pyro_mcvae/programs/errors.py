"""Errors that callers tell apart."""

from __future__ import annotations

__all__ = ["NoCoordinateError"]


class NoCoordinateError(ValueError):
    """A guide site has neither explicit noise nor an unconstrained form."""
