"""Shard a module that was given to ``torch.compile`` before its first forward begins.

[Note: first forward] With a mixed-precision policy, FSDP2 casts a model's inputs and outputs in
hooks that sharding adds. A module only calls hooks that it has when its forward begins, but
Dynamo calls the backend later, in the middle of the first forward: too late to cast the inputs. Or
it never calls the backend: Dynamo is disabled, or it leaves the whole call to Python, as it does
after ``compile()`` of a torch.nn module. So graphshard has to get hold of the module earlier.

``torch.compile`` passes nothing but graphs to a backend. But when it is given a module, it reads
the backend's ``__name__`` (``_TorchCompileWrapper`` in torch/__init__.py, 2.11 and 2.13), and the
module is the argument ``model`` of the calling function. That is the only reason why
``Backend.__name__`` is a property. A backend that is given by name is looked up instead:
``on_lookup`` in _torch/dynamo.py. All code that depends on either is in this file and in
``unsharded``: a hook shards the module when its first compiled forward begins, casts the inputs of
that forward, and removes itself. If torch stops doing either, the first forward raises an error
with advice if inputs are to be cast, and tests/graph/test_first_forward.py fails.

Global hooks, and those that the user registered before ``torch.compile``, run before this hook. If
Dynamo compiles one of them, the module is sharded at that point, and this hook only casts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.hooks import RemovableHandle

from .._torch.dynamo import run_as_python
from .._torch.frames import CompiledCall, CompileRequest, compiled_call
from .._torch.nn import forward_pre_hooks
from .mixed_precision import cast_inputs
from .sharded_model import sharded_model_of
from .unsharded import Sharder


def shard_before_first_forward(
    sharder: Sharder, request: CompileRequest, policy: MixedPrecisionPolicy
) -> None:
    """Register the hook on the module in a ``torch.compile`` call: see [Note: first forward].

    Args:
        policy: policy by which the hook casts the inputs of the first forward.
    """
    root = request.module
    if root is None:
        return
    forget_first_forward(root)
    if sharder.plain_parameters(root) or sharded_model_of(root) is None:
        hook = _FirstForward(sharder, policy, request.is_off)
        hook.handle = root.register_forward_pre_hook(hook, with_kwargs=True)


def forget_first_forward(root: nn.Module) -> None:
    """Remove the hook of ``shard_before_first_forward``, if ``root`` still has one."""
    for hook in _hooks_of(root):
        hook.handle.remove()


def has_yet_to_cast(root: nn.Module, call: CompiledCall) -> bool:
    """Return whether a hook that precedes ``_FirstForward`` is running.

    If so, ``_FirstForward`` will cast the inputs even though the module is sharded by then.
    """
    begun = call.module is root and root in call.called
    hooks = _hooks_of(root) if begun else []
    for hook in hooks:
        hook.casts_anyway = True
    return bool(hooks)


def _hooks_of(root: nn.Module) -> list[_FirstForward]:
    return [hook for hook in forward_pre_hooks(root) if isinstance(hook, _FirstForward)]


class _Copied:
    """Replaces the hook in copies and pickles of a hooked module, and does nothing."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        return None


class _FirstForward:
    """A forward pre-hook that acts once, in the first compiled forward.

    Args:
        is_off: whether ``torch.compile`` is disabled. Compiled and plain calls then look the same,
            so the hook acts in the first forward of either.

    Attributes:
        handle: handle that removes the hook.
        casts_anyway: whether to cast the inputs even if the module is sharded already.
    """

    handle: RemovableHandle
    casts_anyway = False

    def __init__(self, sharder: Sharder, policy: MixedPrecisionPolicy, is_off: bool) -> None:
        self._sharder, self._policy, self._is_off = sharder, policy, is_off

    def __reduce__(self) -> tuple[type[_Copied], tuple[()]]:
        return _Copied, ()

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> Any:
        # If an earlier hook has removed this one, torch still calls it, but without kwargs.
        forgotten = kwargs is None or torch.compiler.is_compiling()
        return None if forgotten else self._run(module, args, kwargs)

    @torch.compiler.disable
    def _run(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        call = compiled_call()
        compiled = call.module is module and self._sharder.compiles(call)
        if not (compiled or self._is_off):
            return None  # a call of the plain module
        self.handle.remove()
        if self._sharder.plain_parameters(module):
            if not self._is_off:
                self._sharder.forward_check.trace_plain(module, lambda: module(*args, **kwargs))
            self._sharder.shard_now(module)
        elif not self.casts_anyway:
            return None
        return cast_inputs(self._policy, args, kwargs)


for _hook in (_FirstForward.__call__, _Copied.__call__):
    run_as_python(_hook)
