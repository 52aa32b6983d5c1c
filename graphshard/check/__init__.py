"""Check a training step on a simulated GPU.

The checks: kernels compile, collectives and copies run in the planned order, streams do not race
on memory, and the step fits into memory.
"""
