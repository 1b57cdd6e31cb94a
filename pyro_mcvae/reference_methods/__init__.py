"""Baselines: wake-sleep and Monte Carlo EM."""
