"""The compiled call in progress, read from the Python stack.

Torch does not pass a backend the compiled module or the call in progress, and passes the options of
``torch.compile`` only with a graph. This module reads them from the frames of torch's own
functions. It alone relies on the names of these functions and of their local variables, which are
the same in torch 2.11.0 and 2.13.0: torch/nn/modules/module.py, torch/__init__.py,
torch/_dynamo/eval_frame.py and resume_execution.py, torch/distributed/pipelining/_backward.py.

[Note: call scope] ``call_scope`` stores values that live as long as one call of a module or of
compiled code, in the ``kwargs`` dictionary of torch's own frame. Alternatives fail:

- Forward hooks that set and reset state, or our own ``__call__``: Dynamo traces them. A graph break
  between set and reset leaves the state set while nothing runs. If Dynamo skips our ``__call__``,
  ``torch.compile(module)`` has nothing to compile. Also, compiled functions may read a parameter
  outside any module's call.
- Weak references to the values: under ``torch.no_grad()``, a value would die between two reads.
- A key that identifies the call, such as ``id(frame)``: nothing signals the end of the call, so
  full parameters would stay alive until the next one.

``call_scope`` relies on three facts (lines of torch 2.13.0; 2.11.0), which
``tests/graph/test_call_scope.py`` tests:

- ``nn.Module._wrapped_call_impl(self, *args, **kwargs)`` calls ``self._call_impl(*args, **kwargs)``
  and does not use ``kwargs`` again; the callee gets a copy (torch/nn/modules/module.py:1774; 1775).
- ``compile_wrapper(*args, **kwargs)``, which ``torch.compile`` creates, calls
  ``fn(*args, **kwargs)`` once and does not use ``kwargs`` again (torch/_dynamo/eval_frame.py:1077;
  957).
- Where Dynamo leaves part of a forward to Python, the calls of the enclosing modules also run as
  these Python functions: Dynamo never resumes in the middle of one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import innermost_backend

from .nn import uncompiled

WRAPPED_CALL = "_wrapped_call_impl"  # the ``nn.Module`` method that ``__call__`` is an alias of
_MODULE_CALL = ("__call__", "_call_impl", WRAPPED_CALL)
_FORWARD = ("forward", "_call_impl", WRAPPED_CALL)
_RESUMED_PREFIX = "torch_dynamo_resume_in_"


def frames() -> Iterator[FrameType]:
    """Yield the frames of the Python stack, innermost first, starting at the caller's caller."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_in_torch_save() -> bool:
    return any(frame.f_code is torch.save.__code__ for frame in frames())


def is_in_compiled_autograd() -> bool:
    """Return whether compiled autograd is compiling or running a backward graph."""
    name = "torch._dynamo.compiled_autograd"
    return any(frame.f_globals.get("__name__") == name for frame in frames())


def params_of_split_backward() -> list[torch.Tensor]:
    """Return the trainable parameters of the pipeline stage whose inputs get gradients now.

    Only schedules that compute the gradients of inputs and weights separately do that. Otherwise,
    the list is empty.
    """
    module = sys.modules.get("torch.distributed.pipelining._backward")
    if module is None:
        return []
    code = module.stage_backward_input.__code__
    in_progress = (frame.f_locals for frame in frames() if frame.f_code is code)
    nodes = next(in_progress, {}).get("weight_grad_fns", [])
    return [node.variable for node in nodes if hasattr(node, "variable")]


def locals_at(error: BaseException) -> Iterator[object]:
    """Yield the local variables of all frames that ``error`` has propagated through so far."""
    step = error.__traceback__
    while step is not None:
        yield from step.tb_frame.f_locals.values()
        step = step.tb_next


@dataclass(frozen=True)
class CompiledCall:
    """The compiled call in progress; all fields are empty if there is none.

    Attributes:
        module: compiled module, or None if a function is compiled.
        called: modules whose calls Dynamo left to Python, outermost first. Dynamo may be about to
            trace the forward of the innermost one. Empty inside a nested compiled call, which may
            have another backend.
        running: modules with a running method that Dynamo left to Python, outermost first.
        codes: code objects of all functions that run inside the call, innermost first.
        backend: ``backend`` argument of ``torch.compile``, resolved if it was a name.
        options: ``options`` argument of ``torch.compile``.
    """

    module: nn.Module | None = None
    called: tuple[nn.Module, ...] = ()
    running: tuple[nn.Module, ...] = ()
    codes: tuple[CodeType, ...] = ()
    backend: object = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def root(self) -> nn.Module | None:
        """Return the compiled module or, for a function, the outermost module that it runs.

        Return None if the function has called no module yet, or inside a nested compiled call.
        """
        if self.module is not None:  # bool(module) may be False, or raise
            return self.module
        # The outermost called module, or the running module that contains it.
        called = next(iter(self.called), None)
        owners = (m for m in self.running if any(part is called for part in m.modules()))
        return next(owners, called)

    def runs(self, root: nn.Module) -> bool:
        """Return whether Dynamo left a running method of ``root`` or a submodule to Python."""
        return not set(root.modules()).isdisjoint(self.running)


def backend_of(callback: Any) -> object:
    """Return the ``backend`` argument of ``torch.compile``, resolved if it was a name."""
    # torch.compile wraps it in a _TorchCompileWrapper (torch/__init__.py).
    wrapper = innermost_backend(callback)
    return getattr(wrapper, "compiler_fn", wrapper)


def compiled_call() -> CompiledCall:
    """Return the compiled call in progress, from the outermost entry of ``torch.compile``."""
    stack = list(frames())
    entries = [i for i, frame in enumerate(stack) if is_dynamo_entry(frame)]
    if not entries:
        return CompiledCall()
    entry, inside, outside = stack[entries[-1]], stack[: entries[-1]], stack[entries[-1] + 1 :]
    calls = [f for f in inside if f.f_code.co_name in _MODULE_CALL]
    methods = [f for f in inside if f.f_code.co_name not in _MODULE_CALL]
    callback: Any = entry.f_locals.get("callback")
    wrapper = innermost_backend(callback)
    return CompiledCall(
        module=_called_module(outside[0]) if outside else None,
        called=_owners(calls) if len(entries) == 1 else (),
        running=_owners(methods),
        codes=tuple(frame.f_code for frame in inside),
        backend=backend_of(callback),
        options=getattr(wrapper, "kwargs", {}).get("options", {}),
    )


def _owners(methods: Iterable[FrameType]) -> tuple[nn.Module, ...]:
    """Return the modules whose methods run in these frames (innermost first), outermost first."""
    owners = [m for m in map(module_of_method, methods) if m is not None]
    return tuple(reversed(owners))


def _called_module(caller: FrameType) -> nn.Module | None:
    if caller.f_code.co_qualname.endswith("_call_impl.<locals>.inner"):  # the module has hooks
        caller = caller.f_back or caller
    return module_of_method(caller) if caller.f_code.co_name in _MODULE_CALL else None


@dataclass(frozen=True)
class CompileRequest:
    """Arguments of the ``torch.compile`` call in progress."""

    given: object  # function or module to compile; for a bound method of a module, the module
    is_off: bool  # whether the call returns ``given`` itself
    in_place: bool = False  # whether ``module.compile()`` made the call
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def module(self) -> nn.Module | None:
        return self.given if isinstance(self.given, nn.Module) else None


def compile_request() -> CompileRequest | None:
    """Return the arguments of the ``torch.compile`` call in progress, or None."""
    # See torch/__init__.py, torch/nn/modules/module.py and ``_optimize`` in
    # torch/_dynamo/eval_frame.py.
    for frame in frames():
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) == ("torch", "compile"):
            given = frame.f_locals.get("model")
            owner = getattr(given, "__self__", None)  # module.compile() passes a bound method
            is_off = bool(frame.f_locals.get("disable"))
            is_off = is_off or os.environ.get("TORCHDYNAMO_DISABLE") == "1"
            options = frame.f_locals.get("options") or {}
            if not isinstance(owner, nn.Module):
                return CompileRequest(given, is_off, options=options)
            in_place = getattr(given, "__name__", "") == "_call_impl"
            return CompileRequest(owner, is_off, in_place, options)
    return None


def call_arguments(module: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of the innermost call of ``module`` in progress in Python.

    Return None if there is no such call, or if Dynamo is tracing it.
    """
    # A call of the wrapper that ``torch.compile`` returned for the module does not count: Dynamo
    # may trace the module's own call inside it.
    for frame in frames():
        if frame.f_code.co_name == "_call_impl" and _first_argument(frame) is module:
            return frame.f_locals["args"], frame.f_locals["kwargs"]
    return None


def is_dynamo_entry(frame: FrameType) -> bool:
    """Return whether ``frame`` is where ``torch.compile`` hands over to Dynamo (eval_frame.py)."""
    names = (frame.f_globals.get("__name__"), frame.f_code.co_name)
    return names == ("torch._dynamo.eval_frame", "compile_wrapper")


def describe_code(code: CodeType) -> str:
    return f"{code.co_name!r} ({code.co_filename}:{code.co_firstlineno})"


def is_resumed(code: CodeType) -> bool:
    """Return whether ``code`` is Dynamo's continuation of a function after a graph break."""
    return code.co_name.startswith(_RESUMED_PREFIX)


def is_forward(frame: FrameType) -> bool:
    """Return whether ``frame`` has the name of a module's call or forward, or is resumed code."""
    return frame.f_code.co_name in _FORWARD or is_resumed(frame.f_code)


def is_in_forward(traced: Iterable[CodeType]) -> bool:
    """Return whether a module's forward runs in Python, or is among the functions being traced."""
    running = (frame.f_code for frame in frames() if module_of_method(frame) is not None)
    names = (code.co_name.removeprefix(_RESUMED_PREFIX) for code in (*traced, *running))
    return any(name.split("_at_")[0] in _FORWARD for name in names)


def module_of_method(frame: FrameType) -> nn.Module | None:
    """Return the module that is the frame's first argument, unwrapped if compiled, or None."""
    owner = _first_argument(frame)
    owner = uncompiled(owner) if isinstance(owner, nn.Module) else None
    return owner if isinstance(owner, nn.Module) else None


def _first_argument(frame: FrameType) -> object:
    # None if the function has no positional arguments.
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None


def call_scope(is_part_of_model: Callable[[nn.Module], bool]) -> dict[Any, Any] | None:
    """Return a dictionary that lives as long as the innermost call in progress.

    It is usually the call's own ``kwargs``: use keys that are not strings.

    Args:
        is_part_of_model: function that returns whether a module's calls count.

    Returns:
        The ``kwargs`` of the innermost call of such a module or of compiled code. If a forward runs
        without such a call, as in ``module.forward(x)`` or when torch.utils.checkpoint reruns part
        of it: a new dictionary each time, shared with no other call. None outside any forward.
    """
    inside = False
    for frame in frames():
        owner = module_of_method(frame) if is_forward(frame) else None
        part = owner is not None and is_part_of_model(owner)
        if is_dynamo_entry(frame) or (part and frame.f_code.co_name == WRAPPED_CALL):
            return frame.f_locals["kwargs"]
        # Checkpointing reruns parts of a forward. Its frame is on the stack in the first run, too.
        inside = inside or part or frame.f_globals.get("__name__") == "torch.utils.checkpoint"
    return {} if inside else None
