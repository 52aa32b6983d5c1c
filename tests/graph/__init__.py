"""Tests of the graphs that are built, on a fake process group of eight ranks in one process."""
