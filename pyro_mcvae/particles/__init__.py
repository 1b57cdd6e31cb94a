"""Run programs with leading dimensions, and compute the weights of such runs."""
