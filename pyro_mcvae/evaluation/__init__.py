"""Evaluators: evidence, diagnostics and posterior draws of a model and guide."""
