"""Links between common GPUs: NVLink, PCIe and Infinity Fabric within a node, and networks.

A link has a *line* rate, which is its peak, and rates that collectives achieve on it, by size.
``devices`` lists the sources in brackets.
"""

from __future__ import annotations

import dataclasses

from ..kinds import TransferKind
from .hardware import COLLECTIVE_KINDS, Hardware, Interconnect, Points, Rate

_MiB = float(1 << 20)

# [tuning]: 6.6 us to start a collective, and 0.6 us (NVLink) or 1.0 us (PCIe) per ring step.
# Check: an all-reduce over 8 ranks has 14 steps, which makes 15 us; [mle] measured 18 us.
START_US = 6.6
_NVLINK_HOP_US = 0.6
_PCIE_HOP_US = 1.0

# [mle] measured 95 us for 32 KiB on 4 x 8 B200. The start and the steps within nodes take 40 us of
# it, which leaves 9 us for each of the 6 steps between nodes. [tuning] has 2.7 us (protocol LL) to
# 14 us (Simple).
NETWORK_HOP_US = 9.0

# Fractions of the rate at 16 GiB, by size in MiB. [mle] measured all-reduce on 8 and on 32 ranks;
# the latencies of 18 and 95 us are subtracted. Other collectives and link generations are assumed
# to achieve the same fractions.
_FRACTIONS_IN_NODE = (
    (1, 0.55),
    (4, 0.45),
    (16, 0.61),
    (64, 0.81),
    (256, 0.93),
    (1024, 0.97),
)
_FRACTIONS_BETWEEN_NODES = (
    (1, 0.08),
    (4, 0.13),
    (16, 0.24),
    (64, 0.61),
    (256, 0.79),
    (1024, 0.99),
)

# Assumed: a coalesced collective takes NCCL few kernels, but the host prepares each tensor.
BUFFER_US = 20.0

# [network]: 46-48 of 50 GB/s. [mle]: 376 of 400 GB/s for 8 cards of 400 Gb/s.
_NETWORK_EFFICIENCY = 0.94


def _bus_rate(line: float, full_fraction: float, fractions: Points) -> Rate:
    """Return the rate of collectives on a link.

    Args:
        line: line rate in bytes/s.
        full_fraction: fraction of the line rate that the largest buffers achieve.
        fractions: fractions of the rate of the largest buffers, by size in MiB.
    """
    return Rate(line, tuple((mib * _MiB, share * full_fraction) for mib, share in fractions))


def in_node(*, hop_us: float, line: float, ring: float, all_reduce: float) -> Interconnect:
    """Return the interconnect within a node.

    Args:
        hop_us: time of a ring step.
        line: line rate in bytes/s.
        ring: bus bandwidth in bytes/s that NCCL's rings achieve.
        all_reduce: bus bandwidth in bytes/s that NCCL's all-reduce achieves.
    """
    bus = {kind: _bus_rate(line, ring / line, _FRACTIONS_IN_NODE) for kind in COLLECTIVE_KINDS}
    bus[TransferKind.ALL_REDUCE] = _bus_rate(line, all_reduce / line, _FRACTIONS_IN_NODE)
    return Interconnect(latency_us=START_US, hop_us=hop_us, buffer_us=BUFFER_US, bus=bus)


def with_network(hardware: Hardware, gbit_per_s: float) -> Hardware:
    """Return ``hardware`` with a network between nodes.

    A collective that spans nodes runs a ring over each rank's network card. So the bandwidths of a
    node's cards add up, to at most the bandwidth within the node.

    Args:
        gbit_per_s: bandwidth of the network in Gb/s, per rank and direction.

    Raises:
        ValueError: ``gbit_per_s`` is not a positive number.
    """
    if not 0 < gbit_per_s < float("inf"):
        raise ValueError(f"gbit_per_s={gbit_per_s!r}: must be a finite number, more than 0")
    line = hardware.ranks_per_node * gbit_per_s / 8 * 1e9
    bus = {}
    for kind in COLLECTIVE_KINDS:
        in_node_fraction = hardware.intra.bus[kind].largest / line
        fraction = min(_NETWORK_EFFICIENCY, in_node_fraction)
        bus[kind] = _bus_rate(line, fraction, _FRACTIONS_BETWEEN_NODES)
    return dataclasses.replace(hardware, inter=dataclasses.replace(hardware.inter, bus=bus))


# Line: 450 GB/s one way (H100 datasheet: 900 GB/s both ways). Rings and all-reduce: [nvlink]. [mle]
# measured 482 GB/s for all-reduce on H200.
NVLINK4 = in_node(hop_us=_NVLINK_HOP_US, line=450e9, ring=370e9, all_reduce=480e9)
# Line: 300 GB/s one way (A100 datasheet: 600 GB/s both ways). Rings: [topo], 12 links of 20 GB/s.
NVLINK3 = in_node(hop_us=_NVLINK_HOP_US, line=300e9, ring=240e9, all_reduce=240e9)
# Line: 900 GB/s one way (DGX B200 datasheet: 1.8 TB/s both ways). Rings: [topo], 18 links of
# 40.1 GB/s. All-reduce: [mle].
NVLINK5 = in_node(hop_us=_NVLINK_HOP_US, line=900e9, ring=722e9, all_reduce=839e9)
# PCIe 4.0 x16 without peer access: 10 GB/s, from torch/_inductor/comm_analysis.py.
PCIE4 = in_node(hop_us=_PCIE_HOP_US, line=32e9, ring=10e9, all_reduce=10e9)
# PCIe 5.0 x16 has twice the line rate. Assumed: NCCL achieves twice as much.
PCIE5 = in_node(hop_us=_PCIE_HOP_US, line=64e9, ring=20e9, all_reduce=20e9)
# MI300X datasheet: 7 links of 128 GB/s both ways to the other GPUs of a node, so 448 GB/s one way.
# Assumed: rings achieve the same fraction of the line rate as on NVLink 4.
INFINITY_FABRIC = in_node(hop_us=_NVLINK_HOP_US, line=448e9, ring=368e9, all_reduce=368e9)
