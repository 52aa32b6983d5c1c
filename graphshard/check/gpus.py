"""GPUs that can be simulated, and the compilation of Triton kernels for them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .._torch.no_gpu.stand_ins import DeviceProperties, compile_kernel
from ..cost.devices import MEMORY_BYTES, TABLE
from ..ops.float8_math import TENSORWISE
from ..ops.mx_math import MXFP8


def _gpu(memory_bytes: int, entry: Mapping[str, Any]) -> DeviceProperties:
    major, minor = entry["capability"]
    return DeviceProperties(
        name=entry["name"],
        major=major,
        minor=minor,
        multi_processor_count=entry["processors"],
        total_memory=memory_bytes,
        L2_cache_size=entry["cache_mib"] << 20,
        shared_memory_per_multiprocessor=entry["shared_kib"] << 10,
        # A thread block may use 1 KiB less than its multiprocessor has.
        shared_memory_per_block_optin=(entry["shared_kib"] - 1) << 10,
    )


# Device properties as CUDA reports them, keyed by name in the device table.
GPUS = {
    name: _gpu(MEMORY_BYTES[name], entry["simulated"])
    for name, entry in TABLE["gpus"].items()
    if "simulated" in entry
}


def has_float8(gpu: DeviceProperties, recipe: str = TENSORWISE) -> bool:
    """Return whether the tensor cores of ``gpu`` support an fp8 recipe.

    "mxfp8" needs compute capability 10.0, other recipes 8.9.
    """
    return gpu.capability >= (100 if recipe == MXFP8 else 89)


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel compiled for a GPU."""

    name: str
    error: str  # reason why it cannot be compiled or loaded, or ""


def compile_kernels(
    kernels: Iterable[tuple[str, str]], device: DeviceProperties
) -> list[CompiledKernel]:
    """Compile each distinct kernel, given by name and source, for ``device``."""
    return [_compile(name, _for_device(source, device), device) for name, source in set(kernels)]


def _compile(name: str, source: str, device: DeviceProperties) -> CompiledKernel:
    try:
        configurations = compile_kernel(name, source)
    except Exception as error:  # raised by Triton, ptxas or Inductor
        return CompiledKernel(name, error=f"{type(error).__name__}: {error}")
    limit = device.shared_memory_per_block_optin
    shared = max(configuration.shared for configuration in configurations)
    too_much = f"needs {shared} bytes of shared memory, but {device.name} has {limit}"
    return CompiledKernel(name, too_much if shared > limit else "")


def _for_device(source: str, device: DeviceProperties) -> str:
    # Inductor hard-codes properties of the target device in the source.
    values = {
        "cc": device.capability,
        "major": device.major,
        "multi_processor_count": device.multi_processor_count,
    }
    for name, value in values.items():
        source = re.sub(rf"\b{name}=\d+", f"{name}={value}", source)
    return source
