"""GPUs that can be simulated, with the properties that CUDA reports.

Sources: NVIDIA's architecture white papers of A100, GA102, H100 and Blackwell for multiprocessors,
caches and memory; the CUDA C++ Programming Guide, technical specifications per compute capability,
for shared memory. A thread block may use 1 KiB less than its multiprocessor has.
"""

from __future__ import annotations

from .._torch.no_gpu.stand_ins import DeviceProperties

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30


def _gpu(
    name: str, capability: tuple[int, int], *, processors: int, memory: int, cache: int, shared: int
) -> DeviceProperties:
    """Build a GPU; ``memory`` in GiB, ``cache`` in MiB, ``shared`` in KiB per multiprocessor."""
    return DeviceProperties(
        name=name,
        major=capability[0],
        minor=capability[1],
        multi_processor_count=processors,
        total_memory=memory * _GIB,
        L2_cache_size=cache * _MIB,
        shared_memory_per_multiprocessor=shared * _KIB,
        shared_memory_per_block_optin=(shared - 1) * _KIB,
    )


GPUS = {
    "A100-40GB": _gpu("NVIDIA A100", (8, 0), processors=108, memory=40, cache=40, shared=164),
    "A100-80GB": _gpu("NVIDIA A100", (8, 0), processors=108, memory=80, cache=40, shared=164),
    "A10G": _gpu("NVIDIA A10G", (8, 6), processors=80, memory=24, cache=6, shared=100),
    "H100": _gpu("NVIDIA H100", (9, 0), processors=132, memory=80, cache=50, shared=228),
    "H200": _gpu("NVIDIA H200", (9, 0), processors=132, memory=141, cache=50, shared=228),
    "B200": _gpu("NVIDIA B200", (10, 0), processors=148, memory=180, cache=126, shared=228),
}
"""GPUs by the names that ``graphshard.cost.devices`` uses, too."""


def has_float8(gpu: DeviceProperties) -> bool:
    """Return whether tensor cores compute in fp8 (compute capability 8.9 and later)."""
    return gpu.capability >= 89
