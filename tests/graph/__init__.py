"""Tests of passes and compiled graphs, mostly on a fake process group of eight ranks."""
