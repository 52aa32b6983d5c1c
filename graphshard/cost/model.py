"""Predict the times of a graph's nodes, its collectives, and the copies around them.

Ranks with the same ``Hardware`` predict the same times, without measuring or communicating. The
time of a kernel is its launch plus the longer of its compute time and its memory time (the roofline
model: Williams et al., CACM 52(4), 2009).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import fx

from ..kinds import HOST_COPIES, TransferKind
from .flops import Flops, call_with_fallback, flops
from .fusion import (
    FusedKernel,
    GraphValues,
    NodeKind,
    UnmaterializedValues,
    unmaterialized_values,
)
from .hardware import ALL_TO_ALL, COLLECTIVE_KINDS, Hardware, Interconnect

# Highest rate of kernels that pack and unpack buffers, in bytes read and written per second.
# Measured for Llama-3 8B on 8 ranks: ``chunk_cat`` 2.4e12 on an H100 and 2.6e12 on an H200,
# ``split_with_sizes_copy`` 2.7e12 on an H100.
_PACKING_RATE = 2.5e12
# Collectives that take as long as one of ``COLLECTIVE_KINDS``.
_PREDICTED_AS = {
    TransferKind.ALL_REDUCE_MAX: TransferKind.ALL_REDUCE,
    TransferKind.ALL_REDUCE_SHARDS: TransferKind.ALL_REDUCE,
}


@dataclass(frozen=True)
class CostModel:
    """Predicted times of a graph's nodes and transfers on ``hardware``, in microseconds."""

    hardware: Hardware  # machine that runs the graphs
    node_cost: Callable[[fx.Node], float | None] | None = None  # overrides predicted times
    # Whether float32 products run in tf32, as after ``set_float32_matmul_precision("high")``.
    tf32: bool = False
    # Whether values that fusion keeps out of memory count as 0 bytes; times always assume fusion.
    fuses: bool = True
    device_type: str | None = None  # target of the kernels (default: the tensors' device type)

    def unmaterialized(self, values: GraphValues) -> UnmaterializedValues:
        """Return the nodes whose values never reach memory; none if ``fuses`` is False.

        If the prediction fails, warn and return none.
        """
        if not self.fuses:
            return UnmaterializedValues()
        return call_with_fallback(
            UnmaterializedValues(),
            unmaterialized_values,
            values,
            what="the unmaterialized values of a graph",
        )

    def compute_us(
        self, graph: fx.Graph, values: GraphValues | None = None
    ) -> dict[fx.Node, float]:
        """Return the time of every node of a functional ATen graph.

        A kernel's time (see [Note: fused kernels] in ``fusion``) is assigned to its last node. All
        other nodes of the kernel take 0, as do inputs, outputs, views, collectives and graphshard's
        copy ops. ``node_cost`` may override the time of any node.

        Raises:
            ValueError: ``node_cost`` returned something other than a time or None.
        """
        # Symbolic sizes have their values from tracing; data-dependent sizes use the fallback of
        # ``size_hint``.
        values = values or GraphValues(graph, self.device_type)
        times = dict.fromkeys(graph.nodes, 0.0)
        for node, kind in values.kinds.items():
            if kind == NodeKind.KERNEL:
                times[node] = self._kernel_us(node, values)
        for kernel in values.fused_kernels:
            times[kernel.last] = self._fused_us(kernel)
        if self.node_cost is not None:
            times.update(_overrides(graph, self.node_cost))
        return times

    def peak_us(self, nodes: Iterable[fx.Node]) -> float:
        """Return the time of matrix products, attention and convolutions at the peak rates."""
        counted = map(self._flops, nodes)
        return sum(1e6 * num / self.hardware.flops_of(dtype).peak for num, dtype, _ in counted)

    def collective_us(
        self, kind: TransferKind, num_bytes: float, world: int, stride: int = 1
    ) -> float:
        """Return the time of one collective, or of one copy between host and device.

        A collective over n ranks is a ring (Patarasuk and Yuan, JPDC 69(2), 2009): ``n - 1`` steps
        carry ``(n - 1) / n`` of the buffer. An all-reduce takes twice as many steps.

        Args:
            num_bytes: bytes of the full buffer: the gathered result, the input that each rank
                reduces, or the copied tensor.
            world: number of ranks; ignored for host copies, as is ``stride``.
            stride: difference between the global ranks of neighbors in the group.

        Raises:
            ValueError: ``kind`` is not a ``TransferKind``, or a number is out of range.
        """
        if kind in HOST_COPIES:
            return self.hardware.host.us(num_bytes) + self.hardware.launch_us
        kind = _PREDICTED_AS.get(kind, kind)
        if kind not in COLLECTIVE_KINDS:
            raise ValueError(f"kind={kind!r}: must be one of {tuple(TransferKind)}")
        if world < 1 or num_bytes < 0:
            raise ValueError(f"{world=}, {num_bytes=}: must be at least 1 and 0, respectively")
        if world == 1:  # a single rank only copies
            return self.copy_us(num_bytes)
        # If the ring spans m nodes, m - 1 of its steps cross the network, which then also
        # determines latency and bandwidth.
        rounds = 2 if kind == TransferKind.ALL_REDUCE else 1
        slowest = self._interconnect(world, stride)
        # Groups that share nodes communicate at the same time; each uses its own ranks' network.
        crosses = self.crosses_nodes(world, stride)
        shared = min(stride, self.hardware.ranks_per_node) if crosses else 1.0
        moved_us = slowest.bus[kind].us(num_bytes * shared) * (world - 1) / world
        return slowest.latency_us + rounds * (self._hops_us(world, stride) + moved_us)

    def exchange_us(self, num_bytes: float, world: int, stride: int = 1) -> float:
        """Return the time of an all-to-all in which each rank sends equal parts to all ranks.

        Args:
            num_bytes: bytes that each rank sends, including the part that it keeps.
            world, stride: as in ``collective_us``.
        """
        if world == 1:
            return self.copy_us(num_bytes)
        hardware, num_nodes = self.hardware, self._num_nodes(world, stride)
        in_node = world / num_nodes  # ranks of the group in each node
        inside_us = _all_to_all_us(hardware.intra, num_bytes, 1)
        outside_us = _all_to_all_us(hardware.inter, num_bytes, hardware.ranks_per_node)
        # Parts for the same node and for other nodes travel at the same time.
        moved_us = max(inside_us * (in_node - 1), outside_us * (world - in_node)) / world
        # Assumed: the messages to all ranks take as long to start as the steps of a ring.
        latency_us = self._interconnect(world, stride).latency_us + self._hops_us(world, stride)
        return latency_us + moved_us

    def crosses_nodes(self, world: int, stride: int = 1) -> bool:
        return self._num_nodes(world, stride) > 1

    def buffer_us(self, world: int, stride: int = 1) -> float:
        return self._interconnect(world, stride).buffer_us

    def slowdown_us(self, lane_us: float) -> float:
        """Return the compute time lost to a hidden collective that takes ``lane_us``."""
        return self.hardware.issue_us + self.hardware.contention * lane_us

    def copy_us(self, num_bytes: float) -> float:
        """Return the time to copy ``num_bytes`` on the device in one kernel, as a copy-in does."""
        moved_us = max(self.hardware.memory.us(2 * num_bytes), 2 * num_bytes / _PACKING_RATE * 1e6)
        return moved_us + self.hardware.launch_us

    def _hops_us(self, world: int, stride: int) -> float:
        num_nodes = self._num_nodes(world, stride)
        intra, inter = self.hardware.intra, self.hardware.inter
        return (world - num_nodes) * intra.hop_us + (num_nodes - 1) * inter.hop_us

    def _interconnect(self, world: int, stride: int) -> Interconnect:
        return self.hardware.inter if self.crosses_nodes(world, stride) else self.hardware.intra

    def _num_nodes(self, world: int, stride: int) -> int:
        # Global ranks fill one node after the other; assume that the first rank starts a node.
        spanned = (world - 1) * stride + 1
        return min(world, math.ceil(spanned / self.hardware.ranks_per_node))

    def _kernel_us(self, node: fx.Node, values: GraphValues) -> float:
        num_flops, dtype, efficiency = self._flops(node)
        compute_us = self.hardware.flops_of(dtype).us(num_flops) / efficiency
        num_bytes = values.read_bytes(node, {}) + values.num_bytes[node]
        moved_us = self.hardware.memory.us(num_bytes)
        return max(compute_us, moved_us) + self.hardware.launch_us

    def _flops(self, node: fx.Node) -> Flops:
        counted = call_with_fallback(Flops(0.0, "float32"), flops, node)
        return (
            counted._replace(dtype="tf32") if self.tf32 and counted.dtype == "float32" else counted
        )

    def _fused_us(self, kernel: FusedKernel) -> float:
        moved_us = self.hardware.memory.us(kernel.num_bytes)
        special_us = kernel.num_special / self.hardware.special_per_s * 1e6
        return max(moved_us, special_us) + self.hardware.launch_us


def optimizer_passes(num_states: int) -> int:
    """Return the reads and writes per parameter element in a step of a fused optimizer."""
    # Parameters and states are read and written; gradients are only read.
    return 2 * (1 + num_states) + 1


def _all_to_all_us(link: Interconnect, num_bytes: float, num_sharing: int) -> float:
    """Return the time of an all-to-all, at the rate of a reduce-scatter if ``link`` has no other.

    ``num_sharing`` is the number of ranks that share the bandwidth of a reduce-scatter's ring.
    """
    if ALL_TO_ALL in link.bus:
        return link.bus[ALL_TO_ALL].us(num_bytes)
    return link.bus[TransferKind.REDUCE_SCATTER].us(num_bytes) * num_sharing


def _overrides(
    graph: fx.Graph, node_cost: Callable[[fx.Node], float | None]
) -> Iterator[tuple[fx.Node, float]]:
    for node in graph.nodes:
        time_us = node_cost(node)
        if time_us is None:
            continue
        if type(time_us) not in (int, float) or not math.isfinite(time_us) or time_us < 0:
            raise ValueError(
                f"node_cost returned {time_us!r} for {node.name}: return a time in microseconds, 0 "
                "or more, or None to have it predicted"
            )
        yield node, float(time_us)
