"""Annealed chains on tensors: kernels, schedules, step sizes, the recursions of SIS and AIS."""
