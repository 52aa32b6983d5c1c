"""Which call of compiled code is under way, read off the Python stack: of what, by which backend, and
what in it runs as Python. The names of frames are those of torch 2.11.0 and 2.13.0.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .dynamo import innermost_backend


def frames() -> Iterator[Any]:
    """The Python stack of the caller's caller, innermost first."""
    frame = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back  # type: ignore[assignment]


@dataclass(frozen=True)
class CompiledCall:
    """The call of compiled code that is under way.

    Attributes:
        module: the module that is compiled, None where a function is.
        running: modules with a method that Dynamo left to Python, outermost first.
        backend: what ``torch.compile`` was given as its backend; ``options`` likewise.
    """

    module: nn.Module | None = None
    running: tuple[nn.Module, ...] = ()
    backend: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def runs(self, root: nn.Module) -> bool:
        """Whether Dynamo left a method of ``root``, or of a part of it, to Python."""
        return not set(root.modules()).isdisjoint(self.running)


def compiled_call() -> CompiledCall:
    """Read the stack from here to where ``torch.compile`` was entered first (eval_frame.py)."""
    stack = list(frames())
    entries = [i for i, frame in enumerate(stack) if is_dynamo_entry(frame)]
    if not entries:
        return CompiledCall()
    methods = [f for f in reversed(stack[: entries[-1]]) if f.f_code.co_name not in _MODULE_CALL]
    running = tuple(m for m in map(module_of_method, methods) if m is not None)
    caller = stack[entries[-1] + 1] if entries[-1] + 1 < len(stack) else None
    if caller is not None and caller.f_code.co_qualname.endswith("_call_impl.<locals>.inner"):
        caller = caller.f_back  # where a module has hooks
    called = caller is not None and caller.f_code.co_name in _MODULE_CALL
    module = module_of_method(caller) if called else None
    # torch.compile wraps what it is given in a _TorchCompileWrapper (torch/__init__.py).
    given = innermost_backend(stack[entries[-1]].f_locals.get("callback"))
    options = getattr(given, "kwargs", {}).get("options", {})
    return CompiledCall(module, running, getattr(given, "compiler_fn", given), options)


def module_to_compile() -> nn.Module | None:
    """The module that the call of ``torch.compile`` that is under way was given, or whose
    ``compile()`` calls it (torch/__init__.py, torch/nn/modules/module.py)."""
    for frame in frames():
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) == ("torch", "compile"):
            given = frame.f_locals.get("model")
            given = getattr(given, "__self__", given)
            return given if isinstance(given, nn.Module) else None
    return None


def call_arguments(module: nn.Module) -> tuple[Any, Any] | None:
    """Those of the call of ``module`` that Python is in, if Dynamo is not tracing that call."""
    for frame in frames():
        if frame.f_code.co_name == "_call_impl" and module_of_method(frame) is module:
            return frame.f_locals["args"], frame.f_locals["kwargs"]
    return None


_MODULE_CALL = ("__call__", "_call_impl", "_wrapped_call_impl")


def is_dynamo_entry(frame: Any) -> bool:
    """Whether ``frame`` is where ``torch.compile`` hands over to Dynamo (eval_frame.py)."""
    names = (frame.f_globals.get("__name__"), frame.f_code.co_name)
    return names == ("torch._dynamo.eval_frame", "compile_wrapper")


def is_recomputation(frame: Any) -> bool:
    """Whether ``frame`` is of torch.utils.checkpoint, which calls parts of a forward in backward."""
    return frame.f_globals.get("__name__") == "torch.utils.checkpoint"


def module_of_method(frame: Any) -> nn.Module | None:
    """The module that the frame's first argument is, if it is one."""
    owner = frame.f_locals.get(frame.f_code.co_varnames[0]) if frame.f_code.co_argcount else None
    return getattr(owner, "_orig_mod", owner) if isinstance(owner, nn.Module) else None
