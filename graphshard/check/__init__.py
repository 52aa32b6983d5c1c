"""Check a training step on a simulated GPU.

The checks: kernels compile, collectives and copies run in the planned order, all memory accesses
are ordered, and the step fits into memory.
"""
