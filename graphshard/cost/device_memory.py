"""Memory sizes of the GPUs in the hardware table, and the fraction lost to fragmentation."""

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
"""Memory in bytes by name in ``devices.HARDWARE``, from the datasheets cited there."""

FRAGMENTATION = 0.03
"""Fraction of memory that the allocator cannot hand out.

Assumed: most allocations here are large, and these are rounded up to 2 MiB
(c10/cuda/CUDACachingAllocator.cpp).
"""
