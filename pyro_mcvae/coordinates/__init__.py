"""The log weight of a pair of programs as a function of its latents' coordinates."""
