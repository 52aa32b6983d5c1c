"""Optimizers: a hook for loading their state. Relies on torch/optim/optimizer.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


@functools.cache
def before_loading_optimizers(act: Callable[[Optimizer, dict[str, Any]], None]) -> None:
    """Call ``act(optimizer, state_dict)`` before any optimizer loads a state dict.

    Torch has no global hook: ``register_load_state_dict_pre_hook`` is per optimizer. Registering
    ``act`` again has no effect.
    """
    load_state_dict = Optimizer.load_state_dict

    @functools.wraps(load_state_dict)
    def load(self: Optimizer, state_dict: dict[str, Any]) -> None:
        act(self, state_dict)
        load_state_dict(self, state_dict)

    Optimizer.load_state_dict = load  # type: ignore[method-assign]
