"""AOTAutograd and Inductor: compilers, custom passes, caches, and the settings that they are run with.

Read in torch/_inductor, torch/_functorch, torch/_logging and torch/_guards.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import (
    CustomGraphPass,
    CustomPartitionerFn,
    get_hash_for_files,
)
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._logging import trace_structured

__all__ = [
    "CustomGraphPass",
    "CustomPartitionerFn",
    "aot_autograd",
    "cache_dir",
    "compile_fx",
    "get_hash_for_files",
    "make_boxed_func",
    "min_cut_rematerialization_partition",
]


# The written order of collectives survives Inductor only with both reorderings off.
KEEP_ORDER = {"reorder_for_peak_memory": False, "reorder_for_locality": False}


# A buffer that is being copied to the host is dead to Inductor, which would write over it. What is held
# until the wait for the copy is safe from the allocator alone.
KEEP_COPIED = {"allow_buffer_reuse": False}


def eager_backward() -> Any:
    """A context in which AOTAutograd compiles a backward graph together with its forward graph."""
    return functorch_config.patch(force_non_lazy_backward_lowering=True)


def saving_activations(budget: float | None) -> Any:
    """A context in which the partitioner saves no more than this part of the activations that it would;
    None: as the config says."""
    if budget is None:
        return nullcontext()
    # With 0 it would also recompute what has to be saved.
    return functorch_config.patch(activation_memory_budget=max(budget, 1e-9))


def donate_nothing() -> None:
    """Have the backward of the graph that is compiled not write over what was saved for it.

    AOTAutograd lets it, if the first backward does not retain its graph; that is not known yet.
    """
    metadata = TracingContext.get().fw_metadata
    if metadata is not None:
        metadata.bw_donated_idxs = []


def trace_artifact(name: str, encoding: str, payload: Callable[[], str]) -> None:
    """Add to what ``TORCH_TRACE`` logs and tlparse shows; ``payload`` is called if it does log.

    Args:
        encoding: "json" or "string".
    """
    metadata = {"name": name, "encoding": encoding}
    trace_structured("artifact", metadata_fn=lambda: metadata, payload_fn=payload)


def mode_options(mode: str | None) -> dict[str, Any]:
    """Return the Inductor options that ``torch.compile(mode=...)`` stands for; None: none.

    ``list_mode_options`` in torch/_inductor/__init__.py.
    """
    return torch._inductor.list_mode_options(mode) if mode else {}
