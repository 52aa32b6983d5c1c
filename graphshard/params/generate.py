"""``generate`` of a sharded transformers model, which every rank runs until all ranks are done.

Each forward gathers parameters, so a rank whose text ends early must keep calling the model.
Transformers' option ``synced_gpus`` does this; transformers sets it only if it detects FSDP or
DeepSpeed. Marking the model as FSDP would also set it, but then Dynamo would not compile the model
(torch/_dynamo/variables/builder.py).
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
    """Wrap a class's ``generate``: for a sharded model, it keeps going until all ranks are done."""

    @functools.wraps(generate)
    def together(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if (groups := mesh_groups_of(self)) is not None:
            # Transformers would compile the model with Inductor instead of with its backend.
            kwargs["disable_compile"] = True
            # The option synchronizes the default group. Seq2SeqTrainer passes False.
            if process_group(groups.all_ranks).size() == dist.get_world_size() > 1:
                kwargs["synced_gpus"] = True
        return generate(self, *args, **kwargs)

    return together
