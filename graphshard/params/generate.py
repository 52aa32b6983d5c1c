"""Wrap transformers' ``generate`` so that ranks of a sharded model stop generating together.

Each forward gathers parameters, so a rank whose text ends early must keep calling the model.
Transformers' option ``synced_gpus`` does this for all ranks of the default process group. By
default, transformers sets it only if it detects FSDP or DeepSpeed. Marking the model as FSDP would
set it, too, but also change how Dynamo handles the model (torch/_dynamo/variables/builder.py). A
model on only some ranks of the default group cannot use it: its ranks must call the model equally
often.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

from .._torch.distributed import process_group
from .trained_module import mesh_groups_of


def has_generate(cls: type) -> bool:
    """Return whether modules of this class have transformers' method ``generate``."""
    method = getattr(cls, "generate", None)
    return inspect.isfunction(method) and "synced_gpus" in inspect.signature(method).parameters


def generate_together(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a class's ``generate`` to synchronize the ranks of a sharded model.

    For a sharded model, the wrapper sets two options: ``synced_gpus``, if the model is sharded over
    all ranks of the default group; and ``disable_compile``, which turns off transformers' own
    compilation.
    """

    @functools.wraps(generate)
    def together(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if (groups := mesh_groups_of(self)) is not None:
            # Transformers would compile the model with Inductor instead of with its backend.
            kwargs["disable_compile"] = True
            # Only the default group is synchronized. Seq2SeqTrainer passes False: override it.
            if process_group(groups.all_ranks).size() == dist.get_world_size() > 1:
                kwargs["synced_gpus"] = True
        return generate(self, *args, **kwargs)

    return together
