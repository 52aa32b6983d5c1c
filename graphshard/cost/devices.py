"""Rates of common GPUs, and of a CPU, for machines that have not been measured.

A rate is the peak from the datasheet and the achieved fraction of it, by size. Comments cite the
source of each number. Sources that many entries share:

    [tuning]     NCCL, src/graph/tuning.cc: latencies of the ring algorithm, protocol LL
    [topo]       NCCL, src/graph/topo.h: NVLink rates that NCCL achieves, per link
    [nvlink]     NCCL's author in the nccl-tests issue "H100 all reduce performance is poor": rings
                 get 370 of 450 GB/s, NVLink SHARP 480
    [network]    an NCCL author in the issue "Single-node and multi-node performance of H100 nodes":
                 46-48 GB/s for each card of 400 Gb/s
    [mle]        github.com/stas00/ml-engineering: its tables of achievable matmul FLOPS (MAMF) and
                 of all-reduce bus bandwidth by size, on 8 H200 and on 4 x 8 B200
    [graphs]     developer.nvidia.com/blog/cuda-graphs: 0.9 us from one short kernel to the next
    [sfu]        CUDA C++ Programming Guide, arithmetic throughput: 16 special functions per clock
                 and multiprocessor; FlashAttention-3 (arXiv 2407.08608): 3.9e12 per second on H100
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import NamedTuple

from ..kinds import TransferKind
from .hardware import HOST_MEMORY, Hardware, Interconnect, Rate
from .links import (
    INFINITY_FABRIC,
    NETWORK_HOP_US,
    NVLINK3,
    NVLINK4,
    NVLINK5,
    PCIE4,
    PCIE5,
    with_network,
)

# --- compute and memory --------------------------------------------------------------------------


def _flops(fraction: float, **tera: float) -> dict[str, Rate]:
    """Return rates of matrix products.

    Args:
        fraction: fraction of the peak that large products achieve.
        tera: dense peaks in Tflop/s, by dtype.
    """
    return {dtype: Rate(peak * 1e12, ((1.0, fraction),)) for dtype, peak in tera.items()}


# H100 datasheet. [mle]: MAMF is 80 % of the peak in bf16, assumed to be the same in tf32 and fp16,
# and 71-73 % in fp8. FP32 without tensor cores: 47 of 60 Tflop/s on an H200 NVL
# (github.com/xzwgit/gpu-flops-bench).
_HOPPER_FLOPS = {
    **_flops(0.78, float32=66.9),
    **_flops(0.80, tf32=494.7, bfloat16=989.4, float16=989.4),
    **_flops(0.72, float8=1978.9),
}
# A100 datasheet. [mle]: MAMF is 87 %. FP32: 17.7 Tflop/s is 94 % of cuBLAS, which therefore reaches
# 18.8 (github.com/AG0708/sgBLAS).
_A100_FLOPS = {
    **_flops(0.96, float32=19.5),
    **_flops(0.87, tf32=156.0, bfloat16=312.0, float16=312.0),
}
# DGX B200 datasheet, per GPU and dense. [mle]: MAMF is 78 % in bf16 and 76 % in fp8.
_B200_FLOPS = {
    **_flops(0.78, float32=80.0, tf32=1125.0, bfloat16=2250.0, float16=2250.0),
    **_flops(0.76, float8=4500.0),
}
# GB200 NVL72 datasheet, dense: 72 GPUs have 180 Pflop/s in bf16, 360 in fp8. Fractions: as B200.
_GB200_FLOPS = {
    **_flops(0.78, float32=80.0, tf32=1250.0, bfloat16=2500.0, float16=2500.0),
    **_flops(0.76, float8=5000.0),
}
# H100 datasheet, PCIe. Fractions: as the SXM module, though the card's 350 W may allow less.
_HOPPER_PCIE_FLOPS = {
    **_flops(0.78, float32=51.0),
    **_flops(0.80, tf32=378.0, bfloat16=756.0, float16=756.0),
    **_flops(0.72, float8=1513.0),
}
# MI300X datasheet, dense. Fractions: assumed to be the same as for the H100.
_MI300X_FLOPS = {
    **_flops(0.78, float32=163.4),
    **_flops(0.80, tf32=653.7, bfloat16=1307.4, float16=1307.4),
    **_flops(0.72, float8=2614.9),
}
# L40S datasheet, dense. RTX 4090: NVIDIA's Ada white paper, with float32 accumulation. Fractions:
# assumed to be the same as for the A10G.
_L40S_FLOPS = {
    **_flops(0.90, float32=91.6),
    **_flops(0.95, tf32=183.0, bfloat16=362.0, float16=362.0, float8=733.0),
}
_RTX4090_FLOPS = {
    **_flops(0.90, float32=82.6),
    **_flops(0.95, tf32=82.6, bfloat16=165.2, float16=165.2, float8=330.3),
}
# NVIDIA A10G datasheet for AWS. An 8192^3 product in bf16 measures 66.6 of 70 Tflop/s.
_A10G_FLOPS = {
    **_flops(0.90, float32=35.0),
    **_flops(0.95, tf32=35.0, bfloat16=70.0, float16=70.0),
}

# PCIe 4.0 and 5.0 x16 datasheets, per direction. Assumed: 80 % is achieved.
_HOST_PCIE4 = Rate(32e9, ((1.0, 0.8),))
_HOST_PCIE5 = Rate(64e9, ((1.0, 0.8),))

# Per GPU of a node of 8, like ``HOST_MEMORY``, but with 8 channels of DDR5-4800 on each of two
# sockets: 614 GB/s. A DGX H100 or H200 has 2 x Xeon 8480C; other nodes are assumed to match.
_HOST_DDR5 = Rate(614.4e9 / 8, HOST_MEMORY.achieved)
# A Grace CPU reads up to 512 GB/s (datasheet); in a GB200, two GPUs share one.
_HOST_GRACE = Rate(512e9 / 2, HOST_MEMORY.achieved)


def _memory(bytes_per_s: float) -> Rate:
    # Copies reach 3.0 of 3.35 TB/s on an H100 and 4.3 of 4.8 TB/s on an H200. Calculon, too, has
    # 0.90 for the A100 (github.com/calculon-ai/calculon, systems/a100_80g.json).
    return Rate(bytes_per_s, ((1.0, 0.90),))


# --- the table -----------------------------------------------------------------------------------


def _gpu(
    name: str,
    *,
    flops: Mapping[str, Rate],
    memory_bytes_per_s: float,
    host: Rate,
    special_per_s: float,
    intra: Interconnect,
    network_gbit_per_s: float,
    ranks_per_node: int = 8,
    host_memory: Rate = HOST_MEMORY,
) -> Hardware:
    """Return the entry of a GPU; ``network_gbit_per_s`` is per GPU and direction."""
    inter = dataclasses.replace(intra, hop_us=NETWORK_HOP_US)
    hardware = Hardware(
        name=name,
        flops=flops,
        memory=_memory(memory_bytes_per_s),
        host=host,
        special_per_s=special_per_s,
        launch_us=3.0,  # [graphs]: 0.9 us between kernels; the shortest kernels take about 2 us
        issue_us=30.0,  # assumed: time for the host to issue a collective
        contention=0.05,  # assumed: NCCL kernels occupy a few multiprocessors and some bandwidth
        ranks_per_node=ranks_per_node,
        intra=intra,
        inter=inter,
        host_memory=host_memory,
    )
    return with_network(hardware, network_gbit_per_s)


def _cpu() -> Hardware:
    """Return the entry of one CPU core with gloo over loopback: half of an AMD EPYC core (Zen 4).

    Measured on one core: 104 Gflop/s in float32, 26 GB/s of copies, 0.8e9 error functions per
    second. Measured on 2 ranks: 300 us for a small collective; a bus bandwidth of 0.7, 0.4 and
    1.1 GB/s for all-gather, reduce-scatter and all-reduce of 16 MiB; 0.05 and 1.5 ms for each
    further tensor of a coalesced all-gather and reduce-scatter. Assumed: ``hop_us``, ``issue_us``
    and ``contention``.
    """
    bus_bytes_per_s = {
        TransferKind.ALL_GATHER: 0.7e9,
        TransferKind.REDUCE_SCATTER: 0.4e9,
        TransferKind.ALL_REDUCE: 1.1e9,
    }
    loopback = Interconnect(
        latency_us=300.0,
        hop_us=100.0,
        buffer_us=800.0,
        bus={kind: Rate(per_s, ((1.0, 0.5),)) for kind, per_s in bus_bytes_per_s.items()},
    )
    return Hardware(
        name="cpu",
        flops={
            "float32": Rate(104e9, ((1.0, 0.5),)),
            "bfloat16": Rate(104e9, ((1.0, 0.25),)),
            "float16": Rate(104e9, ((1.0, 0.25),)),
        },
        memory=Rate(26e9, ((1.0, 0.5),)),
        host=Rate(13e9, ((1.0, 0.5),)),  # a copied byte is read and written
        special_per_s=0.4e9,
        launch_us=5.0,
        issue_us=1500.0,
        # gloo copies and reduces in its own threads, which compete with compute for the core.
        contention=0.3,
        ranks_per_node=8,
        intra=loopback,
        inter=loopback,
        device_type="cpu",
    )


# Memory: datasheets of the SXM modules, and of the A10G. H100-96GB: torchtitan's report on 8 to 512
# H100 (benchmarks/llama3_h100_202412_torchtitan.md).
# Special functions: [sfu], 16 per multiprocessor and clock. 108 multiprocessors at 1.41 GHz (A100),
# 80 at 1.71 GHz (A10G), 148 at 1.85 GHz (B200), 114 at 1.76 GHz (H100-PCIe), 142 and 128 at
# 2.52 GHz (L40S, RTX 4090), 304 at 2.1 GHz (MI300X, whose units are assumed to be as many).
# Networks, per GPU: 8 cards of 400 Gb/s in a DGX H100, H200 and B200, 8 of 200 Gb/s in a DGX A100
# (their datasheets); 100 Gb/s for 8 GPUs in a g5.48xlarge (aws.amazon.com/ec2/instance-types/g5);
# H100-96GB as in torchtitan's report. Assumed for cards in PCIe slots: 200 Gb/s per node for
# H100-PCIe, 100 Gb/s for L40S and RTX 4090.
_ENTRIES = (
    _gpu(
        "H100",
        flops=_HOPPER_FLOPS,
        memory_bytes_per_s=3.35e12,
        host=_HOST_PCIE5,
        host_memory=_HOST_DDR5,
        special_per_s=3.9e12,
        intra=NVLINK4,
        network_gbit_per_s=400,
    ),
    _gpu(
        "H200",
        flops=_HOPPER_FLOPS,
        memory_bytes_per_s=4.8e12,
        host=_HOST_PCIE5,
        host_memory=_HOST_DDR5,
        special_per_s=3.9e12,
        intra=NVLINK4,
        network_gbit_per_s=400,
    ),
    _gpu(
        "A100-40GB",
        flops=_A100_FLOPS,
        memory_bytes_per_s=1.555e12,
        host=_HOST_PCIE4,
        special_per_s=2.4e12,
        intra=NVLINK3,
        network_gbit_per_s=200,
    ),
    _gpu(
        "A100-80GB",
        flops=_A100_FLOPS,
        memory_bytes_per_s=2.039e12,
        host=_HOST_PCIE4,
        special_per_s=2.4e12,
        intra=NVLINK3,
        network_gbit_per_s=200,
    ),
    _gpu(
        "A10G",
        flops=_A10G_FLOPS,
        memory_bytes_per_s=0.6e12,
        host=_HOST_PCIE4,
        special_per_s=2.2e12,
        intra=PCIE4,
        network_gbit_per_s=12.5,
    ),
    _gpu(
        "B200",
        flops=_B200_FLOPS,
        memory_bytes_per_s=8e12,
        host=_HOST_PCIE5,
        host_memory=_HOST_DDR5,
        special_per_s=4.4e12,
        intra=NVLINK5,
        network_gbit_per_s=400,
    ),
    _gpu(
        "H100-PCIe",
        flops=_HOPPER_PCIE_FLOPS,
        memory_bytes_per_s=2.0e12,
        host=_HOST_PCIE5,
        special_per_s=3.2e12,
        intra=PCIE5,
        network_gbit_per_s=25,
    ),
    _gpu(
        "H100-96GB",
        flops=_HOPPER_FLOPS,
        memory_bytes_per_s=2.4e12,
        host=_HOST_PCIE5,
        host_memory=_HOST_DDR5,
        special_per_s=3.9e12,
        intra=NVLINK4,
        network_gbit_per_s=400,
    ),
    _gpu(
        "GB200",
        flops=_GB200_FLOPS,
        memory_bytes_per_s=8e12,
        host=_HOST_PCIE5,
        host_memory=_HOST_GRACE,
        special_per_s=4.4e12,
        intra=NVLINK5,
        network_gbit_per_s=400,
        ranks_per_node=72,  # an NVL72 rack
    ),
    _gpu(
        "MI300X",
        flops=_MI300X_FLOPS,
        memory_bytes_per_s=5.3e12,
        host=_HOST_PCIE5,
        host_memory=_HOST_DDR5,
        special_per_s=10.2e12,
        intra=INFINITY_FABRIC,
        network_gbit_per_s=400,
    ),
    _gpu(
        "L40S",
        flops=_L40S_FLOPS,
        memory_bytes_per_s=0.864e12,
        host=_HOST_PCIE4,
        special_per_s=5.7e12,
        intra=PCIE4,
        network_gbit_per_s=12.5,
    ),
    _gpu(
        "RTX-4090",
        flops=_RTX4090_FLOPS,
        memory_bytes_per_s=1.008e12,
        host=_HOST_PCIE4,
        special_per_s=5.2e12,
        intra=PCIE4,
        network_gbit_per_s=12.5,
    ),
    _cpu(),
)

HARDWARE: dict[str, Hardware] = {entry.name: entry for entry in _ENTRIES}
"""Table entries by name."""

DEFAULT = "A100-80GB"
"""Name of the entry for a GPU that is not in the table: a mid-range one."""

_ENTRY_BY_DEVICE = {
    r"\bH100\b": "H100",
    r"\bH200\b": "H200",
    r"\bA100\b.*40GB": "A100-40GB",
    r"\bA100\b.*80GB": "A100-80GB",
    r"\bA10G\b": "A10G",
    r"\bB200\b": "B200",
}
"""Names of entries, by pattern of ``torch.cuda.get_device_name()``."""

_OTHER_VARIANT = re.compile("PCIE|NVL|MIG", re.IGNORECASE)
"""Names of device variants that are slower than the SXM modules in the table."""


# --- looking up ----------------------------------------------------------------------------------


def find_hardware(name: str) -> Hardware:
    """Return the table's entry for a device.

    Args:
        name: ``torch.cuda.get_device_name()``, "cpu" or an entry's name.

    Raises:
        ValueError: the table has no such entry.
    """
    if name in HARDWARE:
        return HARDWARE[name]
    for pattern, entry in _ENTRY_BY_DEVICE.items():
        if re.search(pattern, name) and not _OTHER_VARIANT.search(name):
            return HARDWARE[entry]
    raise ValueError(
        f"hardware {name!r}: must be one of {sorted(HARDWARE)}, or a file that `python -m "
        "graphshard calibrate` wrote on such a machine"
    )


class DeviceMatch(NamedTuple):
    """The table entry to use for a device.

    Attributes:
        hardware: table entry.
        warning: warning if the device has no entry of its own; otherwise None.
    """

    hardware: Hardware
    warning: str | None


def find_hardware_or_default(name: str) -> DeviceMatch:
    """Return the table's entry for a device, or ``DEFAULT`` for a device that has none.

    Args:
        name: see ``find_hardware``.
    """
    try:
        return DeviceMatch(find_hardware(name), warning=None)
    except ValueError:
        warning = f"{name!r} is not in the table of hardware: it is taken for {DEFAULT}"
        return DeviceMatch(HARDWARE[DEFAULT], warning)
