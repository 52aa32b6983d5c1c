"""The passes, in order. The joint graph is rewritten before it is partitioned; each of the forward,
backward and inference graphs is lowered after Inductor's own passes.

    joint graph ─► merge ─► reshard ─► [partitioner] ─► forward, backward ─► lower ─► Inductor
"""

from __future__ import annotations

from graphshard.passes.lower import lower
from graphshard.passes.merge import merge
from graphshard.passes.reshard import parameter_derived, reshard

JOINT = (merge, reshard)
GRAPH = lower

__all__ = ["GRAPH", "JOINT", "parameter_derived"]
