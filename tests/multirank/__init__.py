"""Tests on several gloo ranks, other than comparisons with another implementation's training."""
