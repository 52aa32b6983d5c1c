"""Tests of graphshard. A package, so rank processes can import test modules by full name."""
