"""All private torch APIs that graphshard uses, by subsystem.

Checked on torch 2.11.0 and 2.13.0; ``no_gpu`` only on torch 2.13.

No other package may use torch names that start with an underscore, read torch's stack frames, or
rely on the placeholder names of its graphs; ``tests/test_private_torch.py`` enforces this, but
allows operators (``torch.ops``). This package imports only the standard library, torch, networkx
and sympy, plus Triton where a GPU is simulated (``no_gpu``).

A module relies on the private modules that it imports. Docstrings and comments name the other torch
files that it relies on, and any difference between the two versions.
"""
