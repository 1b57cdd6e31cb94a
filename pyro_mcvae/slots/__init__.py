"""Discrete sites with several values side by side, for Rao-Blackwellized sums."""
