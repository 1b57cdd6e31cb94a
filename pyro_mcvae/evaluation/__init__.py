"""Judgement: evidence, diagnostics and posterior draws of a model and a guide."""
