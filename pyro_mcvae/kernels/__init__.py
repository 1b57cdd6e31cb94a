"""Markov kernels on annealed targets, without Pyro: proposals, and how they are accepted."""
