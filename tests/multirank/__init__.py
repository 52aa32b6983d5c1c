"""Tests on several gloo ranks that do not compare training with another implementation."""
