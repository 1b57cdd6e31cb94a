"""Runs a pair of Pyro programs and says what its sites are; decides nothing."""
