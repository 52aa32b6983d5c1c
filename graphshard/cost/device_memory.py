"""The memory of the GPUs in the table of hardware, which their rates do not tell; and its waste."""

from __future__ import annotations

_GIB = 1 << 30

MEMORY_BYTES: dict[str, int] = {
    "A100-40GB": 40 * _GIB,
    "A100-80GB": 80 * _GIB,
    "A10G": 24 * _GIB,
    "H100": 80 * _GIB,
    "H200": 141 * _GIB,
    "B200": 180 * _GIB,
    "H100-PCIe": 80 * _GIB,
    "H100-96GB": 96 * _GIB,
    "GB200": 186 * _GIB,
    "MI300X": 192 * _GIB,
    "L40S": 48 * _GIB,
    "RTX-4090": 24 * _GIB,
}
"""Bytes, by name of an entry of ``devices.HARDWARE``: of the datasheets that are cited there."""

FRAGMENTED = 0.03
"""Part of memory that an allocator cannot hand out. Assumed: most allocations here are large, and
those are rounded up to 2 MiB (c10/cuda/CUDACachingAllocator.cpp)."""
