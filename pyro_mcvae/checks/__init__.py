"""Checks that may raise errors, and never change a number."""
