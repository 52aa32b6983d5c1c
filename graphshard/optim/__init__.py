"""Optimizers that have to see more of a parameter than its shard.

Most of torch's optimizers work element by element, so each rank steps its own rows and nothing is
sent. Muon orthogonalises whole matrices: ``muon`` is the optimizer, ``spread`` decides which rank
orthogonalises which matrices (pure), ``row_exchange`` brings rows there and back, and
``newton_schulz`` is the arithmetic. May import ``consensus``, ``ops`` and ``params``.
"""

from .muon import Muon

__all__ = ["Muon"]
