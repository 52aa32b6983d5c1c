"""List the facts that a compiled graph depends on but its Dynamo graph does not show.

A graph from a cache runs no pass and reads nothing again. Therefore everything that a pass, the
planner or torch itself reads while a graph is compiled is part of the one key that we add to every
cache, ``CompileSettings.cache_key``. AOTAutograd's and Inductor's caches use it as the key of our
passes, and plan files are named after it.

    read by                                what                             part of the key
    ------------------------------------   ------------------------------   ------------------------
    all passes, planning, cost             our own code                     hash of the source files
    compile, planning, cost                compiler, ``SchedulePolicy``,    ``fingerprint``
                                           hardware, the first rank's
                                           plans, ``saving``
    keep_unsharded                         ``overrides`` of                 ``cache_key``:
                                           ``reshard_after_forward``        ``regathered``
    lower, ops.collectives, describe,      number of ranks and stride of    ``baked_in``: groups
    float8, keep_unsharded, cost           each group, by name
    ops.collectives (uses_all_to_all)      backend of each group            ``baked_in``: groups
    float8 (unsupported products)          torch, the device, by name       ``baked_in``: machine
    cost (symbolic sizes, as traced)       sizes of the inputs              ``baked_in``: inputs
    cost (tf32), AOTAutograd's trace,      precision of matrix products,    ``baked_in``: modes
    casts                                  autocast, grad mode, default
                                           dtype, deterministic algorithms
    partitioner, Inductor's own passes     settings of both, and other      ``baked_in``: torch's
                                           custom passes                    settings
    all passes                             dtypes, rows, names of groups,   text of the Dynamo
                                           devices: arguments of markers    graph, which torch's own
                                                                            keys contain, too

No graph contains a rank's own number: ops that need it read it at run time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .._torch.distributed import process_group
from .._torch.inductor import settings_text
from .._torch.tensors import size_hint
from ..ops.collectives import span_of


def baked_in(
    inputs: Sequence[object],
    groups: Sequence[str],
    device: torch.device,
    inductor_options: Mapping[str, Any],
) -> str:
    """Return a text that differs if any of these facts does, one fact per line.

    Args:
        inputs: one example for each placeholder of the Dynamo graph.
        groups: names of all groups that the graph's markers may use.
        device: compute device.
        inductor_options: the user's options of ``torch.compile``.
    """
    return "\n".join(
        [
            *(_describe_group(name) for name in groups),
            f"machine: torch {torch.__version__}, {_device_name(device)}",
            f"inputs: {[_describe_input(value) for value in inputs]}",
            f"modes: {_modes()}",
            f"torch's settings: {settings_text(inductor_options)}",
        ]
    )


def _describe_group(name: str) -> str:
    span = span_of(name)
    backends = dist.get_backend_config(process_group(name))
    return f"group {name}: {span.world} ranks, stride {span.stride}, {backends}"


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {torch.backends.cpu.get_cpu_capability()}"


def _describe_input(value: object) -> str:
    """Return what plans depend on: sizes as traced, and whether a gradient is required."""
    if isinstance(value, torch.Tensor):
        sizes = [_size(size) for size in value.shape]
        return f"{value.dtype} {sizes} {value.device.type} {value.requires_grad}"
    return str(_size(value)) if isinstance(value, int | torch.SymInt) else type(value).__name__


def _size(size: int | torch.SymInt) -> int:
    return size if type(size) is int else size_hint(size)


def _modes() -> tuple[object, ...]:
    """Return torch's global modes that affect the trace or its cost."""
    autocast = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    ]
    return (
        autocast,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )
