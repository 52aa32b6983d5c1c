"""Storage for values that live as long as one call of a module or of compiled code.

[Note: call scope] The storage is the ``kwargs`` dictionary of torch's own frame. Alternatives fail:

- A forward pre-hook that sets state and a forward hook that resets it: Dynamo traces both. After a
  graph break between them, the state stays set, or is set while nothing runs.
- Our own ``__call__`` around ``nn.Module.__call__``: the same, if Dynamo traces it. If Dynamo is
  told to skip it, ``torch.compile(module)`` has nothing to compile. Compiled functions that read a
  parameter outside of any module's call have no ``__call__`` at all.
- Weak references to the values: under ``torch.no_grad()``, a value would die between two reads.
- A key that identifies the call, such as ``id(frame)``: nothing signals the end of the call, so
  full parameters would stay alive until the next one.

A frame's local dictionary dies with its call, whatever Dynamo does and however the call ends.

This relies on three facts (line numbers are of torch 2.13.0; 2.11.0):

- ``nn.Module._wrapped_call_impl(self, *args, **kwargs)`` calls ``self._call_impl(*args, **kwargs)``
  and does not use ``kwargs`` again; the callee gets a copy (torch/nn/modules/module.py:1774; 1775).
- ``compile_wrapper(*args, **kwargs)``, which ``torch.compile`` creates, calls
  ``fn(*args, **kwargs)`` once and does not use ``kwargs`` again (torch/_dynamo/eval_frame.py:1077;
  957).
- Where Dynamo leaves part of a forward to Python, the calls of the enclosing modules also run as
  these Python functions: Dynamo never resumes in the middle of one.

``tests/graph/test_call_scope.py`` fails if one of these no longer holds.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import nn

from .frames import (
    WRAPPED_CALL,
    frames,
    is_dynamo_entry,
    is_forward,
    is_recomputation,
    module_of_method,
)


def call_scope(is_part_of_model: Callable[[nn.Module], bool]) -> dict[Any, Any] | None:
    """Return a dictionary that lives as long as the innermost call in progress.

    The dictionary also holds the keyword arguments of that call: use keys that are not strings.

    Args:
        is_part_of_model: whether a module belongs to the model of interest; calls of other modules
            are skipped.

    Returns:
        The ``kwargs`` of the innermost call of such a module or of compiled code. A new dictionary
        if such a module's forward runs without a call (``module.forward(x)``) or
        torch.utils.checkpoint reruns part of one. None outside of any forward.
    """
    inside = False
    for frame in frames():
        part = _is_forward_of(frame, is_part_of_model)
        if is_dynamo_entry(frame) or (part and frame.f_code.co_name == WRAPPED_CALL):
            kwargs: dict[Any, Any] = frame.f_locals["kwargs"]
            return kwargs
        inside = inside or part or is_recomputation(frame)
    return {} if inside else None


def _is_forward_of(frame: FrameType, is_part_of_model: Callable[[nn.Module], bool]) -> bool:
    """Return whether ``frame`` runs a call or a forward of a module of the model."""
    owner = module_of_method(frame) if is_forward(frame) else None
    return owner is not None and is_part_of_model(owner)
