"""``generate`` of transformers for a sharded model: all ranks make the same number of calls.

Every forward gathers parameters, so a rank whose texts end early must keep calling the model until
all ranks are done. That is the option ``synced_gpus``, which transformers sets if it detects FSDP
or DeepSpeed. Marking the model as FSDP would set it too, but then Dynamo leaves the model to Python
(torch/_dynamo/variables/builder.py).
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch.distributed as dist
from torch import nn


def generate_together(model: nn.Module) -> None:
    """Make every ``generate`` in ``model`` run until all ranks are done.

    All modules are patched, because a peft model forwards the call to the model inside it.
    """
    for module in model.modules():
        method = getattr(type(module), "generate", None)
        known = method is not None and "synced_gpus" in inspect.signature(method).parameters
        if known and "generate" not in vars(module):
            module.generate = _together(module.generate)


def _together(generate: Any) -> Any:
    @functools.wraps(generate)
    def together(*args: Any, **kwargs: Any) -> Any:
        # The model is already compiled; transformers would compile it again, with Inductor.
        kwargs["disable_compile"] = True
        kwargs["synced_gpus"] = dist.get_world_size() > 1
        return generate(*args, **kwargs)

    return together
