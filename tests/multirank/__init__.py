"""Tests on several gloo ranks: agreement, errors, communication, memory and files."""
