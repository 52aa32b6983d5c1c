"""Checks of a training step on a simulated GPU.

Do its kernels compile, do collectives and copies run in the planned order, are all memory accesses
ordered, and does the step fit into memory?
"""
