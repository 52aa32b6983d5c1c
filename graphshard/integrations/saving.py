"""``save_pretrained`` of a sharded model: it wants the full state dict, or says how to come by it.

Without one it would write this rank's rows: all ranks together raise an error of safetensors that
tells nothing, and one rank alone waits for the others. Read of transformers 5.23:
``modeling_utils.py``.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn


def save_in_full_alone(model: nn.Module) -> None:
    """Have ``save_pretrained`` of ``model``, and of what it wraps, refuse to write without one."""
    for module in model.modules():
        if hasattr(type(module), "save_pretrained") and "save_pretrained" not in vars(module):
            module.save_pretrained = _in_full(module.save_pretrained)


def _in_full(save: Any) -> Any:
    @functools.wraps(save)
    def in_full(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("state_dict") is None:
            raise ValueError(
                "the model is sharded, so save_pretrained needs all of it: on all ranks call "
                "state = graphshard.full_state_dict(model) (of adapters, adapter_state_dict of "
                "graphshard.integrations.peft), then on the first rank "
                "model.save_pretrained(folder, state_dict=state); with a Trainer, "
                "trainer.save_model(folder) on all ranks"
            )
        return save(*args, **kwargs)

    return in_full
