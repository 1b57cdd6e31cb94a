"""Pyro plumbing: the log weight of a pair of programs, per datum, with any leading dimensions."""
