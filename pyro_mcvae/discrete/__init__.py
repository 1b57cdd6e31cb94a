"""Sums over discrete sites: slots, enumeration, and the control variates of what is sampled."""
