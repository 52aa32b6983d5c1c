"""Tests that need a GPU (marker `gpu`); `benchmarks/gpu.sh` runs them.

`test_training.py` runs the same helper functions on CPU tensors over gloo, so simple mistakes show
up without a GPU.
"""
