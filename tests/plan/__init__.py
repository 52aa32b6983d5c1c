"""Tests of pure code, mostly planning: no process group, no compiler."""
