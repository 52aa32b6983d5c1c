"""Compile the Triton kernels of a recording to machine code, for any GPU."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from .._torch.no_gpu.stand_ins import DeviceProperties, compile_kernel


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel compiled for a GPU.

    Attributes:
        error: reason why the kernel cannot be loaded; "" if it can.
        shared_bytes: largest shared memory of a thread block over all configurations, in bytes.
    """

    name: str
    error: str = ""
    shared_bytes: int = 0


def compile_kernels(
    kernels: Iterable[tuple[str, str]], device: DeviceProperties
) -> list[CompiledKernel]:
    """Compile each distinct kernel for ``device``."""
    return [_compile(name, _for_device(source, device), device) for name, source in set(kernels)]


def _compile(name: str, source: str, device: DeviceProperties) -> CompiledKernel:
    try:
        metadata = compile_kernel(name, source)
    except Exception as error:  # Triton, ptxas or Inductor: the kernel does not compile
        return CompiledKernel(name, error=f"{type(error).__name__}: {error}")
    limit = device.shared_memory_per_block_optin
    shared = max(made.shared for made in metadata)
    too_much = f"asks for {shared} bytes of shared memory, {device.name} has {limit}"
    return CompiledKernel(name, too_much if shared > limit else "", shared)


def _for_device(source: str, device: DeviceProperties) -> str:
    """Write the properties of ``device`` into a kernel's source, as Inductor would."""
    values = {
        "cc": device.capability,
        "major": device.major,
        "multi_processor_count": device.multi_processor_count,
    }
    for name, value in values.items():
        source = re.sub(rf"\b{name}=\d+", f"{name}={value}", source)
    return source
