"""Which latents of a pair of programs share a weight, found out from its runs."""
