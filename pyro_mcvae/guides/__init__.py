"""Guides that are not written by hand."""
