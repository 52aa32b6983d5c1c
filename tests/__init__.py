"""Tests of graphshard: a package, so that rank processes import test modules by their full name."""
