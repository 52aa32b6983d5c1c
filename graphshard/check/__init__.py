"""Checks of a training step for a GPU that is not there: its kernels, the order of its collectives
and copies on their streams, and accesses that nothing keeps in order."""
