"""Optimizers that need more of a parameter than its shard.

Most of torch's optimizers work element by element: each rank steps its rows. Muon orthogonalizes
whole matrices: ``row_exchange`` collects the rows of each matrix on one rank, and sends the results
back.
"""

from .muon import Muon

__all__ = ["Muon"]
