"""The kinds of graphs and transfers; the values also appear in the JSON of plans and dumps."""

from __future__ import annotations

from enum import StrEnum


class _Kind(StrEnum):
    __repr__ = str.__repr__


class GraphKind(_Kind):
    """The part of a training step, or of inference, that a compiled graph computes."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INFERENCE = "inference"


class TransferKind(_Kind):
    """The operation of a transfer, and of a bucket of such transfers.

    When a kind is added, ``tests/plan/test_kinds.py`` finds most tables that lack it, and
    docs/how_it_works.md says how to find the rest.
    """

    # ``pipeline.verify`` distinguishes launches by their ops. gloo's reduce-scatter already uses
    # ``all_to_all_single`` (``ops.collectives.EXCHANGE``), so an all-to-all needs an op of its own.

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_REDUCE_MAX = "all_reduce_max"  # absolute maxima of weights that are gathered in fp8
    ALL_REDUCE_SHARDS = "all_reduce_shards"  # reduce-scattered shards, over replicas (HSDP)
    COPY_TO_DEVICE = "copy_to_device"  # shards before their gather, or offloaded activations
    COPY_TO_HOST = "copy_to_host"  # reduced shards, or activations

    @property
    def is_reduction(self) -> bool:
        return self in _REDUCTIONS

    @property
    def reduces_gradients(self) -> bool:
        return self.is_reduction and self != TransferKind.ALL_REDUCE_MAX

    @property
    def is_fetch(self) -> bool:
        """Whether the transfer brings data to the device for use by the graph.

        Such a transfer must finish before the first use of its data, which is freed after the last
        use. Transfers of other kinds send data that the graph computes, once it is ready.
        """
        return self in _FETCHES


# Kinds that involve no other rank.
HOST_COPIES = (TransferKind.COPY_TO_DEVICE, TransferKind.COPY_TO_HOST)
_FETCHES = (TransferKind.ALL_GATHER, TransferKind.COPY_TO_DEVICE)
_REDUCTIONS = (
    TransferKind.REDUCE_SCATTER,
    TransferKind.ALL_REDUCE,
    TransferKind.ALL_REDUCE_MAX,
    TransferKind.ALL_REDUCE_SHARDS,
)
