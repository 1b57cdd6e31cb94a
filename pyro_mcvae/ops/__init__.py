"""Monte Carlo arithmetic on tensors; imports torch only."""
