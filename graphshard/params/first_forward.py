"""Shards a compiled module before its first forward begins, so that its inputs are cast in time.

[Note: first forward] With a mixed-precision policy FSDP2 casts a model's inputs and outputs, by
hooks that sharding adds to the module. A module calls the hooks that it has when its forward
begins. Dynamo first calls the backend after that, in the middle of the first forward: too late to
cast its inputs. So graphshard has to meet the module before.

``torch.compile`` hands a backend nothing but graphs. While it is given a module, though, it reads
the backend's ``__name__`` (``_TorchCompileWrapper`` in torch/__init__.py, 2.11 and 2.13), and the
module is the argument ``model`` of the call that does. ``Backend.__name__`` is a property for that
reason alone, and all that hangs on it is in this file: a hook that shards the module when its
first compiled forward begins, casts the inputs of that one, and removes itself. If torch stops
reading the name, the first forward raises an error with advice, and
tests/graph/test_first_forward.py fails.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.hooks import RemovableHandle

from .._torch.dynamo import run_as_python
from .._torch.frames import compiled_call, module_to_compile
from .mixed_precision import cast_inputs, has_border


class Sharder(Protocol):
    """The part of a backend that the hook calls."""

    def plain_parameters(self, root: nn.Module) -> list[nn.Parameter]:
        """Return the parameters of ``root`` that are to be sharded and are not yet."""
        ...

    def shard_now(self, root: nn.Module) -> None:
        """Shard ``root`` in place."""
        ...


def shard_before_first_forward(sharder: Sharder, policy: MixedPrecisionPolicy) -> None:
    """Hook the module that ``torch.compile`` is being given: see [Note: first forward].

    Args:
        policy: where it casts nothing at the border of a model, no hook is needed.
    """
    root = module_to_compile()
    if root is not None and has_border(policy):
        hook = _FirstForward(sharder, policy)
        hook.handle = root.register_forward_pre_hook(hook, with_kwargs=True)


class _FirstForward:
    """A forward pre-hook that runs once, in the first forward of compiled code."""

    handle: RemovableHandle

    def __init__(self, sharder: Sharder, policy: MixedPrecisionPolicy) -> None:
        self._sharder, self._policy = sharder, policy

    def __deepcopy__(self, memo: dict[int, Any]) -> _FirstForward:
        return self

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return None if torch.compiler.is_compiling() else self._run(module, args, kwargs)

    @torch.compiler.disable
    def _run(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        call = compiled_call()
        if call.module is not module or call.backend is not self._sharder:
            return None  # a call of the plain module
        self.handle.remove()
        if not self._sharder.plain_parameters(module):
            return None
        self._sharder.shard_now(module)
        return cast_inputs(self._policy, args, kwargs)


run_as_python(_FirstForward.__call__)
