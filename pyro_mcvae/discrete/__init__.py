"""Sum over discrete sites: slots, enumeration, and control variates of sampled values."""
