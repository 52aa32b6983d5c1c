"""Optimizers: the call that loads their state. Read in torch/optim/optimizer.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


@functools.cache
def before_loading_optimizers(act: Callable[[Optimizer, dict[str, Any]], None]) -> None:
    """Have ``act(optimizer, state_dict)`` called before any optimizer loads a state dict.

    ``register_load_state_dict_pre_hook`` is for one optimizer, and there is no global one. What is
    registered again is called once.
    """
    load_state_dict = Optimizer.load_state_dict

    @functools.wraps(load_state_dict)
    def load(self: Optimizer, state_dict: dict[str, Any]) -> None:
        act(self, state_dict)
        load_state_dict(self, state_dict)

    Optimizer.load_state_dict = load  # type: ignore[method-assign]
