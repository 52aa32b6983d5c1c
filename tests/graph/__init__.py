"""Tests of passes and compiled graphs, on a fake process group of eight ranks in one process."""
