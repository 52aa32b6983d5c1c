"""Optimizers that need more of a parameter than its shard.

Most of torch's optimizers work element by element, so each rank steps its own rows without
communication. Muon orthogonalises whole matrices: ``row_exchange`` assigns them to ranks and sends
their rows there and back. May import ``ranks``, ``ops`` and ``params``.
"""

from .muon import Muon

__all__ = ["Muon"]
