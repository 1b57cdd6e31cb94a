"""Compute the log weight of a model and guide as a function of their latents' coordinates."""
