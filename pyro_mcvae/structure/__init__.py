"""Determine which latents of a model and guide share a weight."""
