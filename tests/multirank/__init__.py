"""Tests on several gloo ranks that do not train beside another implementation."""
