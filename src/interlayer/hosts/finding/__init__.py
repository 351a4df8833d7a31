"""Finds the calls, stages, token layout and residual blocks of a network."""
