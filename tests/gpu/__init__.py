"""Tests that need a GPU (marker `gpu`), and the same trainings on the CPU: what runs here without a
GPU, `training.py`, is tried by `test_training.py` on gloo ranks, so that a GPU meets no typing
error. `benchmarks/gpu.sh` runs the folder."""
