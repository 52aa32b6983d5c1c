"""Modules that were passed to ``torch.compile`` and are not sharded yet.

One hook shards a module when its first compiled forward begins; another raises or warns if an
optimizer steps parameters that were never sharded.

[Note: first forward] With a mixed-precision policy, sharding adds hooks that cast a model's inputs
and outputs, as in FSDP2. A forward only calls hooks that are registered when it begins. Dynamo
calls the backend in the middle of the first forward, which is too late to cast the inputs. It never
calls the backend if it is disabled or leaves the whole call to Python, as in ``nn.Linear`` after
``module.compile()``. Therefore graphshard must find the module earlier.

``torch.compile`` passes only graphs to a backend. But when it is given a module, it reads the
backend's ``__name__`` (``_TorchCompileWrapper`` in torch/__init__.py, 2.11 and 2.13), and the
module is the argument ``model`` of the calling function. This is the only reason why
``Backend.__name__`` is a property. A backend given by name is looked up instead: ``on_lookup`` in
_torch/dynamo.py. If torch stops doing either, a first forward whose inputs are to be cast raises an
error with advice, and tests/graph/test_first_forward.py fails.

[Note: never sharded] A model is never sharded if its compiled code never runs: the user calls the
plain model, or compiles a function while Dynamo is off. Each rank then trains its own model. The
symptom is an optimizer step on plain parameters that have gradients:

    torch.compile gets a model, or a function that refers to it    watched until it is sharded
    a plain copy of a model runs, made after ``model.compile()``   watched until it is sharded
    an optimizer steps plain parameters of a watched model         error
    an optimizer steps plain parameters added to a sharded model   error: shard them first
    a step has lr 0 (torch.distributed.checkpoint)                 nothing: no values change
    an optimizer steps any plain parameters while a backend has
    sharded nothing and has no known model                         warning: they may be unrelated

Parameters that ``DistributedDataParallel`` reduces are exempt, and so are single-rank runs.

Torch drops ``model.compile()`` from copies of the model, so users may train a copy and believe that
it is compiled. ``torch.compile(model)`` leaves ``model`` as it is, so its copies may be trained in
any way.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import types
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from .._torch.as_parameter import GatheredParameter
from .._torch.dynamo import run_as_python
from .._torch.frames import CompiledCall, CompileRequest, compiled_call
from .._torch.nn import forward_pre_hooks
from ..errors import BackendError
from ..options.options import Options
from .compare_traces import ForwardCheck
from .mixed_precision import cast_inputs
from .plain_params import REPLACED, WHY_REPLACED, find_reduced_by_ddp, noted_ignored
from .sharded_param import find_unreduced, sharded_model_of, sharded_param_of
from .trained_module import uncompiled_modules


class Sharder(Protocol):
    """The part of ``Backend`` that this module uses."""

    options: Options
    forward_check: ForwardCheck

    def plain_parameters(self, root: nn.Module) -> list[nn.Parameter]: ...

    def shard_now(self, root: nn.Module) -> None: ...

    def compiles(self, call: CompiledCall) -> bool: ...


# --- shard before the first forward --------------------------------------------------------------


def shard_before_first_forward(
    sharder: Sharder, request: CompileRequest, policy: MixedPrecisionPolicy
) -> None:
    """Register a hook that shards a compiled module in its first forward, and casts the inputs.

    The hook replaces that of an earlier call. A function, or a module that is already fully
    sharded, gets none. See [Note: first forward].

    Args:
        policy: policy that sets the dtype of the inputs.
    """
    root = request.module
    if root is None:
        return
    forget_first_forward(root)
    if sharder.plain_parameters(root) or sharded_model_of(root) is None:
        # If compilation is off, a copy may be meant as one of what ``torch.compile`` returned.
        copy_is_watched = request.in_place or request.is_off
        hook = _FirstForward(sharder, policy, request.is_off, copy_is_watched)
        hook.handle = root.register_forward_pre_hook(hook, with_kwargs=True)


def forget_first_forward(root: nn.Module) -> None:
    """Remove the hook of ``shard_before_first_forward``, if ``root`` still has one."""
    for hook in _hooks_of(root):
        hook.handle.remove()


def has_yet_to_cast(root: nn.Module, call: CompiledCall) -> bool:
    """Return whether ``_FirstForward`` has yet to cast the inputs of the call in progress.

    This is the case while Dynamo compiles a pre-hook that runs before ``_FirstForward``. If so,
    also make ``_FirstForward`` cast the inputs even if ``root`` is sharded by then.
    """
    # Global hooks, and hooks registered before torch.compile, run first. If Dynamo compiles one of
    # them, the module is sharded at that point, and ``_FirstForward`` only casts the inputs.
    begun = call.module is root and root in call.called
    hooks = _hooks_of(root) if begun else []
    for hook in hooks:
        hook.casts_anyway = True
    return bool(hooks)


def _hooks_of(root: nn.Module) -> list[_FirstForward]:
    return [hook for hook in forward_pre_hooks(root) if isinstance(hook, _FirstForward)]


class _Copied:
    """Stand-in for the hook in pickles of a hooked module; does nothing."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        return None


class _FirstForward:
    """A forward pre-hook that shards a module in its first compiled call, and casts the inputs.

    If ``torch.compile`` is disabled, it acts in the first call of any kind. Copies of the module
    get a copy of the hook, which acts in compiled calls only.
    """

    handle: RemovableHandle
    casts_anyway = False  # whether to cast even if the module is sharded already
    _is_unwatched_copy = False  # whether a plain call has yet to watch the module, which is a copy

    def __init__(
        self, sharder: Sharder, policy: MixedPrecisionPolicy, is_off: bool, copy_is_watched: bool
    ) -> None:
        self._sharder, self._policy, self._is_off = sharder, policy, is_off
        self._copy_is_watched = copy_is_watched

    def __reduce__(self) -> tuple[type[_Copied], tuple[()]]:
        return _Copied, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> _FirstForward:
        copied = _FirstForward(self._sharder, self._policy, False, self._copy_is_watched)
        copied._is_unwatched_copy = self._copy_is_watched
        memo[id(self)] = copied  # the handle refers to the module's hooks, and so to this one
        copied.handle = copy.deepcopy(self.handle, memo)
        return copied

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> Any:
        # If an earlier hook has removed this one, torch still calls it, but without kwargs.
        forgotten = kwargs is None or torch.compiler.is_compiling()
        return None if forgotten else self._run(module, args, kwargs)

    @torch.compiler.disable
    def _run(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        call = compiled_call()
        compiled = call.module is module and self._sharder.compiles(call)
        # While torch.compile is disabled, compiled and plain calls look the same: act in either.
        if not (compiled or self._is_off):  # a call of the plain module
            if self._is_unwatched_copy:
                self._is_unwatched_copy = False
                watch(self._sharder, module, is_copy=True)
            return None
        self.handle.remove()
        if self._sharder.plain_parameters(module):
            try:
                if not self._is_off:
                    self._sharder.forward_check.trace_plain(module, lambda: module(*args, **kwargs))
                self._sharder.shard_now(module)
            except BaseException:  # shard in the next call, after the user has solved the problem
                self.handle = module.register_forward_pre_hook(self, with_kwargs=True)
                raise
        elif not self.casts_anyway:
            return None
        return cast_inputs(self._policy, module, args, kwargs)


for _traced in (_FirstForward.__call__, _Copied.__call__):
    run_as_python(_traced)


# --- raise if parameters are trained that were never sharded -------------------------------------


@dataclass(frozen=True)
class _Watched:
    """An object passed to ``torch.compile`` or, for a method, the object that it is bound to."""

    sharder: Sharder
    target: weakref.ref[Any]
    is_copy: bool  # whether it was not passed itself, but is a copy of such a module

    def plain_modules(self) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
        for module in _modules_named_by(self.target()):
            # A DTensor is sharded by something else, such as FSDP2.
            params = self.sharder.plain_parameters(module)
            if plain := [p for p in params if not isinstance(p, DTensor)]:
                yield module, plain


# Modules and functions passed to torch.compile, until sharded. Global, like the optimizer hook.
_watched: list[_Watched] = []
# Sharded modules, to which the user may add parameters.
_sharded: weakref.WeakSet[nn.Module] = weakref.WeakSet()
# All backends: parameters added to a sharded module may be among the ``ignored_params`` of any.
_backends: weakref.WeakSet[Sharder] = weakref.WeakSet()
# Backends that have sharded nothing and were never passed to ``torch.compile`` with a model.
_idle: weakref.WeakSet[Sharder] = weakref.WeakSet()
# Hook on all optimizers, because only a step shows that a parameter is trained.
_hook: list[RemovableHandle] = []


def is_plain(value: object) -> bool:
    """Return whether ``value`` is a parameter that graphshard has not sharded."""
    if not isinstance(value, nn.Parameter) or isinstance(value, GatheredParameter):
        return False
    return sharded_param_of(value) is None


def watch_idle(sharder: Sharder) -> None:
    """Watch a new backend, whose model is not known yet: see [Note: never sharded]."""
    _backends.add(sharder)
    _idle.add(sharder)
    _hook_optimizers()


def watch(sharder: Sharder, compiled: object, is_copy: bool = False) -> None:
    """Watch the modules that ``compiled`` refers to, until they are sharded.

    Args:
        compiled: object passed to ``torch.compile``.
        is_copy: whether ``compiled`` is instead a copy of a module on which ``compile()`` was
            called.
    """
    target = compiled.__self__ if isinstance(compiled, types.MethodType) else compiled
    _watched[:] = [
        w
        for w in _watched
        if w.target() is not None and not (w.sharder is sharder and w.target() is target)
    ]
    with contextlib.suppress(TypeError):  # the object cannot be weakly referenced
        _watched.append(_Watched(sharder, weakref.ref(target), is_copy))
    for module in _modules_named_by(target):
        _idle.discard(sharder)
        if sharded_model_of(module) is not None:  # a copy of a sharded model, for example
            watch_sharded(module)


def watch_sharded(root: nn.Module) -> None:
    """Watch a sharded module for parameters that are added to it: see [Note: never sharded]."""
    _sharded.add(root)
    _hook_optimizers()


def stop_watching(sharder: Sharder) -> None:
    """Stop watching ``sharder`` itself, and all models that are sharded by now."""
    _idle.discard(sharder)
    _watched[:] = [w for w in _watched if any(w.plain_modules())]


def _hook_optimizers() -> None:
    if not _hook:
        _hook.append(register_optimizer_step_pre_hook(_before_step))


def _modules_named_by(target: object) -> Iterator[nn.Module]:
    """Yield the modules that compiled code refers to.

    Args:
        target: a module; a function, with its closure, defaults, attributes and the globals that it
            uses; or the owner of a method, with its attributes. None refers to no modules.
    """
    if isinstance(target, nn.Module):
        yield target
        return
    values: list[object] = list(getattr(target, "__dict__", {}).values())
    if isinstance(target, types.FunctionType):
        try:
            names = inspect.getclosurevars(target)
        except ValueError:  # a closure variable is not assigned yet
            return
        values += [*names.nonlocals.values(), *names.globals.values(), *(target.__defaults__ or ())]
    yield from uncompiled_modules(values)


def _before_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    if torch.compiler.is_compiling():
        return
    _warn_of_unreduced(optimizer)
    stepped = _stepped_plainly(optimizer)
    if not stepped:
        return
    for watched in _watched:
        if watched.sharder.options.num_ranks() > 1:
            for module, plain in watched.plain_modules():
                stepped_of_it = stepped.intersection(plain)
                _raise_if_stepped(optimizer, module, stepped_of_it, watched.is_copy)
    for root in list(_sharded):
        model = sharded_model_of(root)
        if model is not None and model.options.num_ranks() > 1:
            _raise_if_stepped(optimizer, root, _unignored(root, stepped))
    for sharder in list(_idle):
        # Only a warning: the parameters may have nothing to do with the backend.
        if sharder.options.num_ranks() > 1 and _diverging(optimizer, stepped):
            _idle.discard(sharder)
            warnings.warn(
                "graphshard: a backend was created, but has sharded nothing, and "
                f"{type(optimizer).__name__} steps parameters that are not sharded. To shard them, "
                "compile their model: torch.compile(model, backend=graphshard.backend(mesh)); if "
                "they belong to a different model, ignore this warning",
                stacklevel=3,
            )


def _warn_of_unreduced(optimizer: Optimizer) -> None:
    fqn = find_unreduced(p for group in optimizer.param_groups for p in group["params"])
    if fqn is not None:
        # Only a warning: other ranks may have no such gradient, and would wait for this one.
        warnings.warn(
            f"graphshard: {type(optimizer).__name__} steps {fqn!r} without the gradients of some "
            "microbatches, which are not reduced yet and go into a later step. Run the forward "
            "whose backward is the last before the step outside of no_sync, with "
            "set_requires_gradient_sync and set_requires_all_reduce on. (Pipeline schedules may "
            "run backwards in another order than forwards.)",
            stacklevel=4,
        )


def _stepped_plainly(optimizer: Optimizer) -> set[nn.Parameter]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if any(REPLACED in vars(param) for param in params):
        raise BackendError(f"{type(optimizer).__name__} steps a parameter: {WHY_REPLACED}")
    # A DTensor is sharded, by graphshard or something else. Most are: this check is the fastest.
    plain = (p for p in params if not isinstance(p, DTensor) and is_plain(p))
    return {p for p in plain if p.grad is not None}


def _diverging(optimizer: Optimizer, stepped: set[nn.Parameter]) -> set[nn.Parameter]:
    """Return the parameters in ``stepped`` that this step may make different between ranks."""
    stepped = stepped - find_reduced_by_ddp()
    if stepped:  # comparing a learning rate on a GPU waits for it
        # torch.distributed.checkpoint creates the state of an optimizer by a step with lr 0, which
        # changes no parameter. After an error, the learning rates would stay 0.
        idle = (group["params"] for group in optimizer.param_groups if group.get("lr") == 0)
        stepped.difference_update(*idle)
    return stepped


def _unignored(root: nn.Module, stepped: set[nn.Parameter]) -> set[nn.Parameter]:
    added = stepped.intersection(root.parameters())
    if added:  # collecting ignored parameters takes longer
        added -= noted_ignored(root).union(*(b.options.ignored_params for b in _backends))
    return added


def _raise_if_stepped(
    optimizer: Optimizer, module: nn.Module, stepped: set[nn.Parameter], is_copy: bool = False
) -> None:
    stepped = stepped and _diverging(optimizer, stepped)
    if not stepped:
        return
    name = next(name for name, param in module.named_parameters() if param in stepped)
    steps = f"{type(optimizer).__name__} steps {name!r} of {type(module).__name__}, which"
    if is_copy and sharded_model_of(module) is None:
        raise BackendError(
            f"{steps} is a copy of a compiled model. Torch drops module.compile() from copies: the "
            "copy is not compiled, so graphshard has not sharded it, and each rank trains its own. "
            "Compile the copy as well, or call graphshard.shard(copy, mesh); if you make its "
            "values and gradients equal between ranks yourself, copy the model before compiling it"
        )
    why = (
        "torch.compile(..., backend=graphshard.backend(...)) has not sharded: the model never ran "
        "compiled, so each rank trains its own copy. Call the model that torch.compile "
        "returned, with compilation enabled (no disable=True, TORCH_COMPILE_DISABLE=1, "
        "set_stance('force_eager') or suppress_errors); or call graphshard.shard(model, mesh), "
        "which also shards models that never run compiled"
    )
    if sharded_model_of(module) is not None:
        why = (
            "was added after graphshard sharded the model, and which no compiled call has sharded "
            "since, so each rank trains its own copy. Call graphshard.shard(model, mesh) whenever "
            "you have added or replaced modules"
        )
    raise BackendError(
        f"{steps} {why}; or list such parameters in ignored_params if you make their values and "
        "gradients equal between ranks yourself"
    )
