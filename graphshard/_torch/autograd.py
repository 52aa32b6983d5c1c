"""Hooks of tensors, and the end of a backward.

Read in torch/_tensor.py and torch/autograd/variable.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def share_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    """``new`` takes over the hook tables of ``old``, so handles given out earlier still remove."""
    if old._backward_hooks:
        new._backward_hooks = old._backward_hooks
    if old._post_accumulate_grad_hooks:
        new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks


def gradient_hooks(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], torch.Tensor | None]]:
    return list((tensor._backward_hooks or {}).values())


def post_accumulate_hooks(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], None]]:
    return list((tensor._post_accumulate_grad_hooks or {}).values())


_called_after: dict[Callable[[], None], int] = {}  # the last backward, by what it ends with


def at_end_of_backward(act: Callable[[], None]) -> None:
    """Have ``act`` called once when the backward that is under way is over, if one is."""
    current = torch._C._current_graph_task_id()
    if current >= 0 and _called_after.get(act) != current:
        _called_after[act] = current
        torch.autograd.Variable._execution_engine.queue_callback(act)
