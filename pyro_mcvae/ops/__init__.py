"""Monte Carlo arithmetic on tensors, without Pyro."""
