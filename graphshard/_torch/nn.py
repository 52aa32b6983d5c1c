"""Modules' own tables of parameters, and containers of tensors.

Read in torch/nn/modules/module.py, torch/distributed/utils.py and checkpoint/_nested_dict.py.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.utils import _apply_to_tensors as apply_to_tensors

__all__ = ["apply_to_tensors", "unflatten_state_dict"]


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The registered parameters of this module alone; writable."""
    return module._parameters


def uncompiled(value: object) -> object:
    """Return the module that ``torch.compile`` wrapped in ``value``, or ``value`` itself.

    ``OptimizedModule._orig_mod`` in torch/_dynamo/eval_frame.py.
    """
    return getattr(value, "_orig_mod", value)
