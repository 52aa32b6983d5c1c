"""Optimizers that need more of a parameter than its shard.

Most of torch's optimizers work element by element, so each rank steps its own rows without
communication. Muon orthogonalises whole matrices: ``muon`` is the optimizer, ``spread`` decides
which rank orthogonalises which matrices (pure), ``row_exchange`` sends rows to those ranks and
results back, and ``newton_schulz`` is the arithmetic. May import ``ranks``, ``ops`` and
``params``.
"""

from .muon import Muon

__all__ = ["Muon"]
