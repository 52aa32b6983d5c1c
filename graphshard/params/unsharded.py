"""Detect optimizers that are about to step parameters that should be sharded, but are not.

A model is never sharded if its compiled code never runs: the user calls the plain model, or Dynamo
is off while a function is compiled. Each rank would then silently train a model of its own. The
symptom is an optimizer step on plain parameters that have gradients:

    torch.compile is given a model, or a function that names it    watched until it is sharded
    an optimizer steps plain parameters of a watched model         error
    an optimizer steps any plain parameters while a backend has
    sharded nothing and knows no model                             warning: they may be unrelated

Parameters that ``DistributedDataParallel`` reduces are exempt, and so are single-rank runs.
"""

from __future__ import annotations

import contextlib
import inspect
import types
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from .._torch.as_parameter import GatheredParameter
from .._torch.frames import CompiledCall
from .._torch.nn import uncompiled
from ..errors import BackendError
from ..options.options import Options
from .compare_traces import ForwardCheck
from .find import find_reduced_by_ddp
from .sharded_param import sharded_param_of


class Sharder(Protocol):
    """Interface of ``Backend`` for sharding; see that class for docstrings."""

    options: Options
    forward_check: ForwardCheck

    def plain_parameters(self, root: nn.Module) -> list[nn.Parameter]: ...

    def shard_now(self, root: nn.Module) -> None: ...

    def compiles(self, call: CompiledCall) -> bool: ...


@dataclass(frozen=True)
class _Watched:
    """A module, a function, or the owner of a method that was passed to ``torch.compile``."""

    sharder: Sharder
    given: weakref.ref[Any]

    def plain_modules(self) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
        """Yield each module that has parameters still to be sharded, with these parameters."""
        for module in modules_named_by(self.given()):
            plain = [p for p in self.sharder.plain_parameters(module) if not _is_split(p)]
            if plain:
                yield module, plain


_watched: list[_Watched] = []
_idle: weakref.WeakSet[Sharder] = weakref.WeakSet()
"""Backends that sharded nothing and that ``torch.compile`` never got together with a model."""
_hook: list[RemovableHandle] = []
"""Hook on all optimizers; empty while nothing is watched."""


def is_plain(value: object) -> bool:
    """Return whether ``value`` is a parameter that graphshard has not sharded."""
    if not isinstance(value, nn.Parameter) or isinstance(value, GatheredParameter):
        return False
    return sharded_param_of(value) is None


def _is_split(param: nn.Parameter) -> bool:
    """Return whether the parameter is a DTensor, sharded by something else such as FSDP2."""
    return isinstance(param, DTensor)


def watch_idle(sharder: Sharder) -> None:
    """Watch a new backend, which has no known model yet."""
    _idle.add(sharder)
    _hook_optimizers()


def watch(sharder: Sharder, given: object) -> None:
    """Watch the models of an object passed to ``torch.compile``, until they are sharded."""
    _watched[:] = [w for w in _watched if w.given() is not None]
    target = given.__self__ if isinstance(given, types.MethodType) else given
    if not any(w.sharder is sharder and w.given() is target for w in _watched):
        with contextlib.suppress(TypeError):  # the object cannot be weakly referenced
            _watched.append(_Watched(sharder, weakref.ref(target)))
    if any(True for _ in modules_named_by(target)):  # bool(module) may raise
        _idle.discard(sharder)
    _hook_optimizers()


def stop_watching(sharder: Sharder) -> None:
    """Stop watching ``sharder``, which has sharded a model, and all models sharded by now."""
    _idle.discard(sharder)
    _watched[:] = [w for w in _watched if any(w.plain_modules())]
    if not _watched and not _idle:
        while _hook:
            _hook.pop().remove()


def _hook_optimizers() -> None:
    if not _hook:
        _hook.append(register_optimizer_step_pre_hook(_before_step))


def modules_named_by(given: object) -> Iterator[nn.Module]:
    """Yield the modules that compiled code refers to.

    For a function, these are in its closure, globals, defaults and attributes; for the owner of a
    method, in its attributes.

    Args:
        given: module, function, or object whose method is compiled; None: no modules.
    """
    if isinstance(given, nn.Module):
        yield given
        return
    values: list[object] = list(getattr(given, "__dict__", {}).values())
    if isinstance(given, types.FunctionType):
        try:
            names = inspect.getclosurevars(given)
        except ValueError:  # a closure variable is not assigned yet
            return
        values += [*names.nonlocals.values(), *names.globals.values(), *(given.__defaults__ or ())]
    for value in map(uncompiled, values):
        if isinstance(value, nn.Module):
            yield value


def _before_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Raise or warn if an optimizer steps parameters that should be sharded; a step pre-hook."""
    if torch.compiler.is_compiling():
        return
    stepped = _stepped_plainly(optimizer) if _watched or _idle else set()
    if not stepped:
        return
    for watched in _watched:
        if watched.sharder.options.num_ranks() > 1:
            for module, plain in watched.plain_modules():
                _raise_if_stepped(optimizer, module, stepped.intersection(plain))
    for sharder in list(_idle):
        if sharder.options.num_ranks() > 1 and stepped - find_reduced_by_ddp():
            _idle.discard(sharder)
            _warn_of_idle(optimizer)


def _stepped_plainly(optimizer: Optimizer) -> set[nn.Parameter]:
    """Return the optimizer's plain parameters that have gradients."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    return {p for p in params if is_plain(p) and not _is_split(p) and p.grad is not None}


def _raise_if_stepped(optimizer: Optimizer, module: nn.Module, stepped: set[nn.Parameter]) -> None:
    stepped = stepped and stepped - find_reduced_by_ddp()
    if not stepped:
        return
    name = next(name for name, param in module.named_parameters() if param in stepped)
    raise BackendError(
        f"{type(optimizer).__name__} steps {name!r} of {type(module).__name__}, which "
        "torch.compile(..., backend=graphshard.backend(...)) was to shard: no compiled call of it "
        "has run, so each rank trains a model of its own. Call what torch.compile returned, with "
        "compiling on (no disable=True, TORCH_COMPILE_DISABLE=1, set_stance('force_eager') or "
        "suppress_errors); or shard it by graphshard.shard(model, mesh), which trains uncompiled "
        "as well; or list its parameters in ignored_params if you reduce their gradients yourself"
    )


def _warn_of_idle(optimizer: Optimizer) -> None:
    warnings.warn(
        "graphshard: a backend was made and has sharded nothing yet, and "
        f"{type(optimizer).__name__} steps parameters that are not sharded: if they are to be, "
        "compile the model itself: torch.compile(model, backend=graphshard.backend(mesh))",
        stacklevel=4,
    )
