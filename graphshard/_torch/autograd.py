"""Tensor hooks and versions, backward callbacks, and leaves added to backward's ``inputs``.

Relies on torch/_tensor.py, torch/autograd/variable.py and graph.py, and the ``CompiledFunction`` in
torch/_functorch/_aot_autograd/runtime_wrappers.py.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch.autograd.graph import get_gradient_edge

from .dynamo import run_as_python, run_with_callees_as_python
from .frames import params_of_split_backward
from .patches import patch

_R = TypeVar("_R")


def share_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    """Give ``new`` the hook tables of ``old``; existing handles can still remove hooks."""
    if old._backward_hooks:
        new._backward_hooks = old._backward_hooks
    if old._post_accumulate_grad_hooks:
        new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks


def drop_hooks(tensor: torch.Tensor) -> None:
    """Detach the hook tables from ``tensor`` without emptying them; they may be shared."""
    tensor._backward_hooks = None
    tensor._post_accumulate_grad_hooks = None  # type: ignore[assignment]


_SEEN = "graphshard: seen"


def has_live_graph(leaf: torch.Tensor) -> bool:
    """Return whether a live autograd graph leads to ``leaf``."""
    if not leaf.requires_grad or leaf.is_inference():
        return False
    # The leaf refers to its node weakly. Unless a graph keeps the node alive, each lookup creates a
    # new node, without our mark.
    _metadata_of(leaf)[_SEEN] = True
    return bool(_metadata_of(leaf).pop(_SEEN, False))


def is_held_by_torch(tensor: torch.Tensor) -> bool:
    """Return whether C++ objects hold ``tensor``: views, or autograd graphs that have saved it."""
    count: int = tensor._use_count()  # type: ignore[attr-defined]  # mypy's stub lacks it
    return count > 1  # one reference is Python's


def _metadata_of(leaf: torch.Tensor) -> dict[str, object]:
    metadata: Any = get_gradient_edge(leaf).node.metadata
    return metadata


def take_gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return ``tensor.grad`` and set it to None, bypassing ``__torch_function__``."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient, tensor.grad = tensor.grad, None
    return gradient


def gradient_hooks(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], torch.Tensor | None]]:
    return list((tensor._backward_hooks or {}).values())


def post_accumulate_hooks(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], None]]:
    return list((tensor._post_accumulate_grad_hooks or {}).values())


def step_in_backward(param: torch.Tensor) -> None:
    """Run the optimizers that ``_apply_optimizer_in_backward`` has given ``param``, if any."""
    # Torch would run them after the ``AccumulateGrad`` node of ``param``, which may never run
    # (torch/distributed/optim/apply_optimizer_in_backward.py).
    optimizers = getattr(param, "_in_backward_optimizers", ())
    for optimizer in optimizers:
        optimizer.step()
    if optimizers:
        param.grad = None


def version_of(tensor: torch.Tensor) -> int:
    # Inference tensors have no version.
    return 0 if tensor.is_inference() else tensor._version


def address_of(tensor: torch.Tensor) -> int:
    """Return the data pointer of ``tensor``, or 0 if a ``torch.func`` transform hides it."""
    return 0 if torch._C._functorch.is_functorch_wrapped_tensor(tensor) else tensor.data_ptr()


class _BackwardEnd:
    """Callbacks to run at the end of one backward."""

    def __init__(self) -> None:
        self.acts: list[Callable[[], None]] = []
        self.success_acts: dict[Callable[[], None], None] = {}

    @run_with_callees_as_python
    def __call__(self) -> None:
        self._act()
        for act in self.success_acts:
            act()

    # Autograd calls this object only if backward succeeds, but drops it in any case.
    @run_with_callees_as_python
    def __del__(self) -> None:
        self._act()

    def _act(self) -> None:
        while self.acts:
            self.acts.pop(0)()


# Callbacks of backwards in progress, keyed by graph task ID. Autograd's queue keeps them alive.
_ends: weakref.WeakValueDictionary[int, _BackwardEnd] = weakref.WeakValueDictionary()


def current_backward() -> int:
    """Return the graph task ID of the backward in progress on this thread, or -1."""
    return torch._C._current_graph_task_id()


def _current_end() -> _BackwardEnd | None:
    number = current_backward()
    if number < 0:
        return None
    end = _ends.get(number)
    if end is None:
        end = _ends[number] = _BackwardEnd()
        torch.autograd.Variable._execution_engine.queue_callback(end)
    return end


def on_backward_end(act: Callable[[], None]) -> None:
    """Call ``act`` when the backward in progress ends, whether it succeeds or fails.

    ``act`` must not communicate, because backward may fail on a single rank. It is never called if
    no backward is in progress.
    """
    if (end := _current_end()) is not None:
        end.acts.append(act)


def on_backward_success(act: Callable[[], None]) -> None:
    """Call ``act`` if the backward in progress succeeds.

    ``act`` runs at the end of that backward, after all ``on_backward_end`` callbacks. Of equal
    callables, only one runs. None is ever called if no backward is in progress.
    """
    if (end := _current_end()) is not None:
        end.success_acts.setdefault(act)


def on_graph_error(
    compiled: Callable[..., _R],
    act: Callable[[BaseException], None],
    start_backward: Callable[[Any], None] | None = None,
) -> Callable[..., _R]:
    """Wrap a compiled graph to call ``act`` with every error that it or its backward raises.

    The error then propagates. If a graph is wrapped again, the inner ``act`` runs first.
    ``start_backward`` is called before each of its backwards.
    """
    forward, is_wrapped = _acting_on_errors(compiled, act), False

    def run(*args: object) -> _R:
        nonlocal is_wrapped
        if is_wrapped:
            return forward(*args)
        outputs, nodes = call_and_find_nodes(forward, args)
        # AOTAutograd creates one ``autograd.Function`` class per compiled graph, whose ``backward``
        # runs the backward graph (torch/_functorch/_aot_autograd/runtime_wrappers.py).
        for node in {type(node): node for node in nodes}.values():
            if start_backward is not None:
                before_backward(node, start_backward)
            function = node._forward_cls
            function.backward = staticmethod(_acting_on_errors(function.backward, act))
        is_wrapped = bool(nodes)
        return outputs

    return run


def _acting_on_errors(
    compiled: Callable[..., _R], act: Callable[[BaseException], None]
) -> Callable[..., _R]:
    @functools.wraps(compiled)
    def run(*args: object) -> _R:
        try:
            return compiled(*args)
        except BaseException as error:
            act(error)
            raise

    run_as_python(run)
    return run


def before_backward(node: Any, act: Callable[[Any], None]) -> None:
    """Call ``act(ctx)`` before each backward of the compiled graph that created ``node``."""
    backward = node._forward_cls.backward

    @functools.wraps(backward)
    def run(ctx: Any, *args: object) -> object:
        act(ctx)
        return backward(ctx, *args)

    run_as_python(run)
    run_with_callees_as_python(act)
    node._forward_cls.backward = staticmethod(run)


def call_and_find_nodes(compiled: Callable[..., _R], args: Sequence[object]) -> tuple[_R, set[Any]]:
    """Call a compiled graph; return its outputs and the nodes of this call (``compiled_nodes``)."""
    if not torch.is_grad_enabled():
        return compiled(*args), set()
    # A graph may return its inputs, whose nodes belong to other graphs, and may write to inputs,
    # which then lead to its own node.
    others = compiled_nodes(args)
    outputs = compiled(*args)
    found = compiled_nodes((*outputs, *args)) if isinstance(outputs, Sequence) else []
    return outputs, set(found).difference(others)


def compiled_nodes(outputs: Iterable[object]) -> list[Any]:
    """Return the autograd nodes of the compiled graphs that produced ``outputs`` or their bases.

    A node is the ``ctx`` of its graph's backward and accepts new attributes.
    """
    nodes = (value.grad_fn for value in outputs if isinstance(value, torch.Tensor))
    return [found for node in nodes if node is not None for found in _compiled_below(node)]


def _compiled_below(node: Any) -> list[Any]:
    # AOTAutograd may replay a chain of views outside of the graph. Stop at compiled nodes: their
    # ``next_functions`` has an entry per parameter, which is slow.
    nodes = [node]
    while len(nodes) == 1 and nodes[0] is not None and not _is_compiled(type(nodes[0])):
        nodes = [below for below, _ in nodes[0].next_functions]
    return [node for node in nodes if _is_compiled(type(node))]


def _is_compiled(node_type: Any) -> bool:
    return getattr(getattr(node_type, "_forward_cls", None), "__name__", "") == "CompiledFunction"


def saved_tensors(node: Any) -> list[torch.Tensor]:
    # AOTAutograd keeps tensors saved by a user's ``autograd.Function`` in a separate list, whose
    # versions autograd does not check.
    return [*node.saved_tensors, *node._tensors_no_vc_check]


def saves_unpacked() -> bool:
    """Return whether autograd saves tensors for backward as they are, without a pack hook."""
    # See ``saved_tensors_hooks`` in torch/autograd/graph.py. Reading a tensor that a
    # ``torch.utils.checkpoint`` hook has packed would recompute it.
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is None


# Torch's own message (torch/csrc/autograd/python_engine.cpp).
_UNUSED = (
    "One of the differentiated Tensors appears to not have been used in the graph. Set "
    "allow_unused=True if this is the desired behavior."
)


@functools.cache
def extend_backward_inputs(
    leaves_of: Callable[[object, bool], Sequence[Any]],
    gradient_of: Callable[..., torch.Tensor | None],
    check_split: Callable[[Sequence[torch.Tensor]], None],
) -> None:
    """Make ``torch.autograd.grad`` and ``backward(inputs=)`` add leaves to their inputs.

    Args:
        leaves_of: ``leaves_of(input, accumulates)`` returns the leaves to add for an input, if any.
            ``accumulates`` is False for ``torch.autograd.grad``, which returns gradients.
        gradient_of: ``gradient_of(input, gradient, *others)`` combines an input's own gradient with
            those of its added leaves. Any of them may be None; the result is None if all are.
        check_split: function that raises an error if a backward cannot be split into one for
            inputs and one for these weights. Pipeline schedules do that, and look up weights in
            the graph themselves.
    """
    run = torch.autograd.graph._engine_run_backward

    @functools.wraps(run)
    def run_backward(
        outputs: Any,
        grads: Any,
        retain: Any,
        create: Any,
        inputs: Any,
        allow_unreachable: bool = False,
        **kwargs: Any,
    ) -> Any:
        accumulates = kwargs.get("accumulate_grad", False)
        if inputs and (weights := params_of_split_backward()):
            check_split(weights)
        given = [[value, *leaves_of(value, accumulates)] for value in inputs]
        if all(len(tensors) == 1 for tensors in given):
            return run(outputs, grads, retain, create, inputs, allow_unreachable, **kwargs)
        # Usually, only one tensor of each input has been used.
        flat = tuple(itertools.chain(*given))
        results = run(outputs, grads, retain, create, flat, True, **kwargs)
        if accumulates:
            return results
        left = iter(results)
        parts = [[next(left) for _ in tensors] for tensors in given]
        gradients = tuple(
            gradient_of(value, *own) if len(own) > 1 else own[0]
            for value, own in zip(inputs, parts)
        )
        if not allow_unreachable and any(gradient is None for gradient in gradients):
            raise RuntimeError(_UNUSED)
        return gradients

    run_as_python(run_backward)
    for function in (leaves_of, gradient_of, check_split, params_of_split_backward):
        run_with_callees_as_python(function)
    # The modules that ``torch.compiler`` also patches during tracing (torch/compiler/__init__.py).
    for module in ("torch.autograd.graph", "torch.autograd"):
        patch(f"{module}._engine_run_backward", lambda _: run_backward)
