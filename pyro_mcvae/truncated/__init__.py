"""Truncated posteriors: sets of discrete states for every datum, and their evolutionary search."""
