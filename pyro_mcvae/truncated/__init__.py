"""Truncated posteriors: sets of discrete states of each datum, and their evolutionary search."""
