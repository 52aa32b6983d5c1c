"""``generate`` of transformers for a sharded model: all ranks make the same number of calls.

Every call of the model gathers, so a rank whose texts end early has to go on until the others are
done: ``synced_gpus``, which transformers sets where it finds FSDP or DeepSpeed. Its mark for FSDP
would do, but makes Dynamo leave the model to Python (torch/_dynamo/variables/builder.py).
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch.distributed as dist
from torch import nn


def generate_together(model: nn.Module) -> None:
    """Have every ``generate`` in ``model`` go on until it is done on all ranks.

    A peft model hands the call on to the model inside of it, so all modules are looked at.
    """
    for module in model.modules():
        method = getattr(type(module), "generate", None)
        known = method is not None and "synced_gpus" in inspect.signature(method).parameters
        if known and "generate" not in vars(module):
            module.generate = _together(module.generate)


def _together(generate: Any) -> Any:
    @functools.wraps(generate)
    def together(*args: Any, **kwargs: Any) -> Any:
        # The model is compiled already; transformers would compile it once more, by Inductor.
        kwargs["disable_compile"] = True
        kwargs["synced_gpus"] = dist.get_world_size() > 1
        return generate(*args, **kwargs)

    return together
