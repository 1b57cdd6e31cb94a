"""Guides that are not written by hand: truncated posteriors and the states that they keep."""
