"""Compiled graphs that ``torch._dynamo.reset()`` frees.

Dynamo keeps what a backend returns in a global until the bytecode that calls it is gone
(``CleanupHook`` in torch/_dynamo/utils.py). But that bytecode outlives the reset: the flight
recorder of process groups keeps the code on the Python stack of the last 2,000 collectives, and our
graphs launch collectives. So we give Dynamo a wrapper that can be emptied.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.symbolic_convert import InstructionTranslator


def freed_on_reset(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a backend's result, so that a reset frees it along with the frame being compiled."""
    wrapper = _FreedOnReset(function, weakref.ref(InstructionTranslator.current_tx().f_code))
    _wrappers().add(wrapper)
    return wrapper


class _FreedOnReset:
    """A callable that can be emptied.

    Args:
        function: function to call.
        code: weak reference to the code of the frame that calls it.
    """

    # No __dict__: Dynamo's own wrapper would copy its entries and keep the function alive.
    __slots__ = ("__weakref__", "code", "function")

    def __init__(self, function: Callable[..., Any], code: weakref.ref[CodeType]) -> None:
        self.function, self.code = function, code

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


class _OnReset:
    """A start callback without effect, which lives until ``reset()`` drops all callbacks."""

    def __init__(self) -> None:
        self.wrappers: weakref.WeakSet[_FreedOnReset] = weakref.WeakSet()
        weakref.finalize(self, _empty, self.wrappers).atexit = False

    def __call__(self, _: object) -> None:
        pass


def _wrappers() -> weakref.WeakSet[_FreedOnReset]:
    """Return the wrappers that the next reset empties."""
    handler = torch._dynamo.callback_handler
    for callback in handler.start_callbacks:
        if isinstance(callback, _OnReset):
            return callback.wrappers
    handler.register_start_callback(_OnReset())
    return _wrappers()


def _empty(wrappers: weakref.WeakSet[_FreedOnReset]) -> None:
    for wrapper in wrappers:
        code = wrapper.code()
        if code is not None and _debug_get_cache_entry_list(code):
            _wrappers().add(wrapper)  # only the callbacks were dropped
        else:
            wrapper.function = _is_dropped


def _is_dropped(*args: object) -> None:
    raise RuntimeError("torch._dynamo.reset() has dropped this graph while its forward ran")
