"""The device table (``devices.toml``): rates and memory of common GPUs and a CPU."""

from __future__ import annotations

import dataclasses
import re
import tomllib
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..kinds import TransferKind
from .hardware import ALL_TO_ALL, COLLECTIVE_KINDS, HOST_MEMORY, Hardware, Interconnect, Rate

_TABLE_FILE = Path(__file__).with_name("devices.toml")
TABLE: dict[str, Any] = tomllib.loads(_TABLE_FILE.read_text(encoding="utf-8"))

_MiB = float(1 << 20)
_COLLECTIVES = TABLE["collectives"]

# Assumed fraction of device memory lost to fragmentation: most allocations are large, and the
# allocator rounds large ones up to 2 MiB (c10/cuda/CUDACachingAllocator.cpp).
FRAGMENTATION = 0.03


def with_network(hardware: Hardware, gbit_per_s: float) -> Hardware:
    """Return ``hardware`` with a network of ``gbit_per_s`` Gb/s per rank and direction."""
    assert gbit_per_s > 0
    # A collective that spans nodes runs one ring per network card. The bandwidths of a node's cards
    # add up, but cannot exceed the bandwidth within the node.
    line = hardware.ranks_per_node * gbit_per_s / 8 * 1e9
    bus: dict[str, Rate] = {}
    for kind in COLLECTIVE_KINDS:
        fraction = _COLLECTIVES["network_efficiency"]
        if hardware.ranks_per_node > 1:
            fraction = min(fraction, hardware.intra.bus[kind].largest / line)
        bus[kind] = _bus_rate(line, fraction, _COLLECTIVES["between_nodes"])
    # In an all-to-all, each rank sends only through its own card. Assumed: the card is as efficient
    # as in a ring that sends the same number of bytes through it.
    cards = hardware.ranks_per_node
    fractions = [(mib / cards, share) for mib, share in _COLLECTIVES["between_nodes"]]
    bus[ALL_TO_ALL] = _bus_rate(line / cards, _COLLECTIVES["network_efficiency"], fractions)
    return dataclasses.replace(hardware, inter=dataclasses.replace(hardware.inter, bus=bus))


def with_node_size(hardware: Hardware, num_ranks: int) -> Hardware:
    """Return ``hardware`` with ``num_ranks`` ranks per node and its network bandwidth per rank.

    Collectives between nodes are at most as fast as within a node.
    """
    resized = dataclasses.replace(hardware, ranks_per_node=num_ranks)
    if hardware.name in TABLE["gpus"] and hardware == HARDWARE[hardware.name]:
        return with_network(resized, TABLE["gpus"][hardware.name]["network_gbit_per_s"])
    ratio = num_ranks / hardware.ranks_per_node
    bus = dict(hardware.inter.bus)
    for kind in COLLECTIVE_KINDS:  # these peaks are per node
        in_node = hardware.intra.bus[kind].largest / bus[kind].largest
        factor = min(ratio, in_node) if ratio > 1 else ratio
        bus[kind] = dataclasses.replace(bus[kind], peak=bus[kind].peak * factor)
    return dataclasses.replace(resized, inter=dataclasses.replace(hardware.inter, bus=bus))


def _bus_rate(line: float, full_fraction: float, fractions: Sequence[Sequence[float]]) -> Rate:
    """Return the rate of collectives on a link.

    Args:
        line: line rate in bytes/s.
        full_fraction: fraction of the line rate that the largest buffers achieve.
        fractions: pairs of a buffer size in MiB and its fraction of the largest buffers' rate.
    """
    return Rate(line, tuple((mib * _MiB, share * full_fraction) for mib, share in fractions))


def _rate(peak_and_fraction: Sequence[float], unit: float = 1.0) -> Rate:
    peak, fraction = peak_and_fraction
    return Rate(peak * unit, ((1.0, fraction),))


def _flops(tflops: Mapping[str, Sequence[float]]) -> dict[str, Rate]:
    return {dtype: _rate(rate, 1e12) for dtype, rate in tflops.items()}


def _link(name: str) -> Interconnect:
    link = TABLE["link"][name]
    achieved: dict[str, float] = dict.fromkeys(COLLECTIVE_KINDS, link["ring"])
    achieved |= {name: link[name] for name in (TransferKind.ALL_REDUCE, ALL_TO_ALL)}
    line, in_node = link["line"], _COLLECTIVES["in_node"]
    return Interconnect(
        latency_us=_COLLECTIVES["start_us"],
        hop_us=link["hop_us"],
        buffer_us=_COLLECTIVES["buffer_us"],
        bus={kind: _bus_rate(line, rate / line, in_node) for kind, rate in achieved.items()},
    )


def _gpu(name: str, entry: Mapping[str, Any]) -> Hardware:
    every = TABLE["gpu"]
    intra = _link(entry["link"])
    in_host = entry.get("host_memory")
    hardware = Hardware(
        name=name,
        flops=_flops(TABLE["tflops"][entry["tflops"]]),
        memory=_rate((entry["memory_bytes_per_s"], every["memory_fraction"])),
        host=_rate(TABLE["host"][entry["host"]]),
        special_per_s=entry["special_per_s"],
        launch_us=every["launch_us"],
        issue_us=every["issue_us"],
        contention=every["contention"],
        ranks_per_node=entry.get("ranks_per_node", every["ranks_per_node"]),
        intra=intra,
        inter=dataclasses.replace(intra, hop_us=_COLLECTIVES["network_hop_us"]),
        host_memory=_rate(TABLE["host_memory"][in_host]) if in_host else HOST_MEMORY,
    )
    return with_network(hardware, entry["network_gbit_per_s"])


def _cpu(entry: Mapping[str, Any]) -> Hardware:
    bus: dict[str, Rate] = {TransferKind(kind): _rate(rate) for kind, rate in entry["bus"].items()}
    loopback = Interconnect(**entry["loopback"], bus=bus)
    numbers = ("special_per_s", "launch_us", "issue_us", "contention", "ranks_per_node")
    return Hardware(
        name="cpu",
        flops=_flops(entry["tflops"]),
        memory=_rate(entry["memory"]),
        host=_rate(entry["host"]),
        intra=loopback,
        inter=loopback,
        device_type="cpu",
        **{name: entry[name] for name in numbers},
    )


HARDWARE: dict[str, Hardware] = {  # keyed by name
    **{name: _gpu(name, entry) for name, entry in TABLE["gpus"].items()},
    "cpu": _cpu(TABLE["cpu"]),
}

# Device memory, keyed by name in ``HARDWARE``.
MEMORY_BYTES: dict[str, int] = {
    name: entry["memory_gib"] << 30 for name, entry in TABLE["gpus"].items()
}

DEFAULT = "A100-80GB"  # entry for GPUs that are not in the table: a mid-range GPU

# Table entries, keyed by a regular expression for ``torch.cuda.get_device_name()``.
_ENTRY_BY_DEVICE = {
    r"\bH100\b": "H100",
    r"\bH100 PCIe\b": "H100-PCIe",
    r"\bH200\b": "H200",
    r"\bA100\b.*40GB": "A100-40GB",
    r"\bA100\b.*80GB": "A100-80GB",
    r"\bA10G\b": "A10G",
    r"\bB200\b": "B200",
    r"\bGB200\b": "GB200",
    r"\bL40S\b": "L40S",
    r"\bRTX 4090\b": "RTX-4090",
    r"\bMI300X\b": "MI300X",
}

# Words that mark slower variants. A device matches an entry only if both contain the same words.
_VARIANT = re.compile("PCIE|NVL|MIG|LAPTOP")


def find_hardware(name: str) -> Hardware:
    """Look up a device in the table, by entry name or by ``torch.cuda.get_device_name()``.

    Raises:
        ValueError: the table has no entry for ``name``.
    """
    if name in HARDWARE:
        return HARDWARE[name]
    for pattern, entry in _ENTRY_BY_DEVICE.items():
        if re.search(pattern, name) and _variants(name) == _variants(entry):
            return HARDWARE[entry]
    raise ValueError(
        f"hardware {name!r}: must be one of {sorted(HARDWARE)}, or a file written by `python -m "
        "graphshard calibrate` on a machine with this hardware"
    )


def _variants(name: str) -> set[str]:
    return set(_VARIANT.findall(name.upper()))


def load_hardware(name: str) -> Hardware:
    """Load the calibration file ``name`` if it exists; otherwise, look up ``name`` in the table.

    Raises:
        ValueError: the file is malformed, or the table has no entry for ``name``.
        OSError: the file cannot be read.
    """
    return Hardware.load(Path(name)) if Path(name).is_file() else find_hardware(name)


def find_hardware_or_default(name: str) -> Hardware:
    """Look up a device in the table; if it is missing, warn and return the ``DEFAULT`` entry."""
    try:
        return find_hardware(name)
    except ValueError:
        warnings.warn(
            f"graphshard: hardware {name!r} is not in the device table. Rates that were not "
            "measured by `python -m graphshard calibrate` and passed as "
            f"SchedulePolicy(hardware=FILE) are those of {DEFAULT}",
            stacklevel=2,
        )
        return HARDWARE[DEFAULT]
