"""Clusters to forecast for: GPUs and their memory, nodes, and the network between them."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass

from ..cost.devices import MEMORY_BYTES, load_hardware, with_network, with_node_size
from ..cost.hardware import Hardware


@dataclass(frozen=True)
class Cluster:
    """A cluster of identical GPUs in nodes of equal size, created by :func:`cluster`.

    Attributes:
        hardware: one GPU and its interconnects; a node has ``hardware.ranks_per_node`` GPUs.
        num_gpus: total number of GPUs.
        memory_bytes: memory of one GPU.
    """

    hardware: Hardware
    num_gpus: int
    memory_bytes: int

    @property
    def num_nodes(self) -> int:
        return -(-self.num_gpus // self.hardware.ranks_per_node)

    @property
    def has_fp8(self) -> bool:
        return "float8" in self.hardware.flops

    def __str__(self) -> str:
        nodes = f"{self.num_nodes} node{'s' * (self.num_nodes > 1)}"
        return f"{self.num_gpus} x {self.hardware.name} in {nodes}"


def cluster(
    device: str | Hardware,
    gpus: int,
    nodes: int | None = None,
    *,
    link: str | None = None,
    memory_gb: float | None = None,
) -> Cluster:
    """Return a cluster of identical GPUs.

    Args:
        device: name in the device table (``graphshard/cost/devices.toml``), path of a file written
            by ``python -m graphshard calibrate``, or a ``Hardware``.
        gpus: total number of GPUs.
        nodes: number of nodes; must divide ``gpus`` (default: the smallest number that does, with
            nodes no larger than the device's usual ones).
        link: network bandwidth between nodes, per GPU and direction, and optionally the latency of
            one hop between nodes, as in "100Gb/s,5us" or "100Gb/s" (default: the device's).
        memory_gb: memory of one GPU in GB (1e9 bytes; default: the device's).

    Raises:
        ValueError: the device is unknown, its file is malformed, its memory is neither known nor
            given, or another argument is invalid.
        OSError: the device's file cannot be read.
    """
    hardware = load_hardware(device) if isinstance(device, str) else device
    if not (isinstance(gpus, int) and 0 < gpus <= 1_000_000):
        raise ValueError(f"gpus={gpus!r}: must be an integer from 1 to 1000000")
    if nodes is None and gpus > (most := hardware.ranks_per_node) and gpus % most:
        nodes = next(number for number in range(gpus // most + 1, gpus + 1) if gpus % number == 0)
        if gpus // nodes < most / 4:
            raise ValueError(
                f"gpus={gpus}: cannot be divided into equal nodes of {math.ceil(most / 4)} to "
                f"{most} GPUs: pass the number of nodes, or another number of GPUs"
            )
    if nodes is not None:
        if not (isinstance(nodes, int) and nodes > 0 and gpus % nodes == 0):
            raise ValueError(f"nodes={nodes!r}: must be a positive integer that divides {gpus=}")
        hardware = with_node_size(hardware, gpus // nodes)
    if link is not None:
        hardware = _with_link(hardware, link)
    return Cluster(hardware, gpus, _memory_bytes(hardware, memory_gb))


def _memory_bytes(hardware: Hardware, memory_gb: float | None) -> int:
    if memory_gb is not None:
        if not 0 < memory_gb < float("inf"):
            raise ValueError(f"memory_gb={memory_gb!r}: must be positive and finite")
        return int(memory_gb * 1e9)
    if hardware.name not in MEMORY_BYTES:
        raise ValueError(
            f"memory_gb: the memory of {hardware.name!r} is not known; pass it, as in --memory "
            "80GB or memory_gb=80"
        )
    return MEMORY_BYTES[hardware.name]


_LINK = re.compile(r"(\d+\.?\d*)\s*(Gb|GB|Tb|TB)(?:/s|ps)(?:,\s*(\d+\.?\d*)\s*(us|ms))?")
_GBIT = {"Gb": 1.0, "GB": 8.0, "Tb": 1000.0, "TB": 8000.0}


def _with_link(hardware: Hardware, link: str) -> Hardware:
    match = _LINK.fullmatch(link.strip())
    if match is None:
        raise ValueError(f'link={link!r}: must be like "100Gb/s,5us" or "50GB/s"')
    number, unit, latency, time_unit = match.groups()
    if not float(number):
        raise ValueError(f'link={link!r}: the bandwidth must be positive, as in "100Gb/s,5us"')
    hardware = with_network(hardware, float(number) * _GBIT[unit])
    if latency is None:
        return hardware
    hop_us = float(latency) * (1000.0 if time_unit == "ms" else 1.0)
    return dataclasses.replace(hardware, inter=dataclasses.replace(hardware.inter, hop_us=hop_us))
