"""Hooks and versions of tensors; the end of a backward, and its errors.

Read in torch/_tensor.py and torch/autograd/variable.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch


def share_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    """Give ``new`` the hook tables of ``old``, so that handles given out earlier still remove."""
    if old._backward_hooks:
        new._backward_hooks = old._backward_hooks
    if old._post_accumulate_grad_hooks:
        new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks


def gradient_hooks(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], torch.Tensor | None]]:
    """Return the hooks that may replace the gradient of ``tensor``."""
    return list((tensor._backward_hooks or {}).values())


def post_accumulate_hooks(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], None]]:
    """Return the hooks that run once ``tensor.grad`` is there."""
    return list((tensor._post_accumulate_grad_hooks or {}).values())


def version_of(tensor: torch.Tensor) -> int:
    """Return a number that grows with every change of ``tensor`` in place.

    0 where there is none, under ``torch.inference_mode``.
    """
    return 0 if tensor.is_inference() else tensor._version


_last_backward: dict[Callable[[], None], int] = {}
"""For each function that was queued, the number of the last backward that it was queued for."""


def at_end_of_backward(act: Callable[[], None]) -> None:
    """Have ``act`` called once when the backward that is under way is over, if there is one.

    Args:
        act: a function of a module, so that all calls pass the same object.
    """
    current = torch._C._current_graph_task_id()
    if current >= 0 and _last_backward.get(act) != current:
        _last_backward[act] = current
        torch.autograd.Variable._execution_engine.queue_callback(act)


def on_backward_error(outputs: Iterable[object], explain: Callable[[RuntimeError], None]) -> bool:
    """Have ``explain`` called with what the backward of a compiled graph raises, before it goes on.

    AOTAutograd makes a class of ``autograd.Function`` for every graph that it compiles, whose
    ``backward`` runs the backward graph (torch/_functorch/_aot_autograd/runtime_wrappers.py).

    Args:
        outputs: of the forward graph.

    Returns:
        Whether the outputs lead to such a class.
    """
    nodes = [value.grad_fn for value in outputs if isinstance(value, torch.Tensor)]
    nodes += [node for view in nodes if view is not None for node, _ in view.next_functions]
    functions = {getattr(type(node), "_forward_cls", None) for node in nodes}
    compiled = [f for f in functions if f is not None and f.__name__ == "CompiledFunction"]
    for function in compiled:
        function.backward = staticmethod(_explained(function.backward, explain))
    return bool(compiled)


def _explained(
    backward: Callable[..., object], explain: Callable[[RuntimeError], None]
) -> Callable[..., object]:
    @functools.wraps(backward)
    def run(*args: object) -> object:
        try:
            return backward(*args)
        except RuntimeError as error:
            explain(error)
            raise

    return run
