"""The kinds of graphs, and of what travels between ranks or between host and device in one.

The values are those of plans and dumps, as JSON.
"""

from __future__ import annotations

from enum import StrEnum


class GraphKind(StrEnum):
    """What a compiled graph is for."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INFERENCE = "inference"


class TransferKind(StrEnum):
    """What a transfer does, and the bucket that carries it."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_REDUCE_MAX = "all_reduce_max"
    """The largest values of all weights that travel in fp8."""
    ALL_REDUCE_SHARDS = "all_reduce_shards"
    """What a reduce-scatter left on this rank, over the ranks that hold the same shards (HSDP)."""
    COPY_TO_DEVICE = "copy_to_device"
    """Shards that the host keeps, before they are gathered; activations that wait on the host."""
    COPY_TO_HOST = "copy_to_host"
    """Reduced shards that the host keeps; activations that leave the device."""


HOST_COPIES = (TransferKind.COPY_TO_DEVICE, TransferKind.COPY_TO_HOST)
"""The kinds that no other rank takes part in."""
