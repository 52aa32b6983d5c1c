"""Hooks and versions of tensors; the end of a backward, and its errors.

Read in torch/_tensor.py and torch/autograd/variable.py.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from .dynamo import run_with_callees_as_python


def share_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    """Give ``new`` the hook tables of ``old``, so that handles given out earlier still remove."""
    if old._backward_hooks:
        new._backward_hooks = old._backward_hooks
    if old._post_accumulate_grad_hooks:
        new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks


def drop_hooks(tensor: torch.Tensor) -> None:
    """Take its hook tables from ``tensor``; they stay as they are."""
    tensor._backward_hooks = None
    tensor._post_accumulate_grad_hooks = None  # type: ignore[assignment]


_SEEN = "graphshard: seen"


def is_in_graph(leaf: torch.Tensor) -> bool:
    """Return whether a graph of autograd that is alive leads to ``leaf``."""
    if not leaf.requires_grad or leaf.is_inference():
        return False
    # The leaf refers to its node weakly: without a graph each look makes another one.
    _metadata_of(leaf)[_SEEN] = True
    return bool(_metadata_of(leaf).pop(_SEEN, False))


def _metadata_of(leaf: torch.Tensor) -> dict[str, object]:
    metadata: Any = get_gradient_edge(leaf).node.metadata
    return metadata


def take_gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of ``tensor``, which has none from then on; by no method of its class."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient, tensor.grad = tensor.grad, None
    return gradient


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


def address_of(tensor: torch.Tensor) -> int:
    """Return where the tensor's memory is; 0 where a ``torch.func`` transform hides it."""
    return 0 if torch._C._functorch.is_functorch_wrapped_tensor(tensor) else tensor.data_ptr()


class _BackwardEnd:
    """Calls functions when one backward is over.

    Autograd calls it if the backward has succeeded, and drops it in any case.
    """

    def __init__(self) -> None:
        self.acts: list[Callable[[], None]] = []
        self.acts_of_success: dict[Callable[[], None], None] = {}

    @run_with_callees_as_python
    def __call__(self) -> None:
        self._act()
        for act in self.acts_of_success:
            act()

    def __del__(self) -> None:
        self._act()

    @run_with_callees_as_python
    def _act(self) -> None:
        while self.acts:
            self.acts.pop(0)()


_ends: weakref.WeakValueDictionary[int, _BackwardEnd] = weakref.WeakValueDictionary()
"""By number, the ends of backwards that are under way; autograd's queue keeps them alive."""


def current_backward() -> int:
    """Return the number of the backward that is under way in this thread; -1: there is none."""
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


def after_backward(act: Callable[[], None]) -> None:
    """Have ``act`` called when the backward that is under way is over, or has failed.

    It must not communicate: ranks fail alone. Without a backward under way it is not called.
    """
    if (end := _current_end()) is not None:
        end.acts.append(act)


def at_success_of_backward(act: Callable[[], None]) -> None:
    """Have ``act`` called once when the backward that is under way has succeeded, if there is one,
    behind all that was given to ``after_backward``.

    Args:
        act: a function of a module, so that all calls pass the same object.
    """
    if (end := _current_end()) is not None:
        end.acts_of_success.setdefault(act)


def on_backward_error(outputs: Iterable[object], act: Callable[[BaseException], None]) -> bool:
    """Have ``act`` called with what the backward of a compiled graph raises, before it goes on;
    what was given earlier is called earlier.

    AOTAutograd makes a class of ``autograd.Function`` for every graph that it compiles, whose
    ``backward`` runs the backward graph (torch/_functorch/_aot_autograd/runtime_wrappers.py).

    Args:
        outputs: of the forward graph.

    Returns:
        Whether the outputs lead to such a class.
    """
    compiled = {type(node)._forward_cls for node in compiled_nodes(outputs)}
    for function in compiled:
        function.backward = staticmethod(_acting_on_errors(function.backward, act))
    return bool(compiled)


def before_backward(node: Any, act: Callable[[Any], None]) -> None:
    """Have ``act`` called with the node of each run of a compiled graph, before its backward.

    Args:
        node: that of any run, from :func:`compiled_nodes`.
    """
    backward = node._forward_cls.backward

    @functools.wraps(backward)
    def run(ctx: Any, *args: object) -> object:
        act(ctx)
        return backward(ctx, *args)

    node._forward_cls.backward = staticmethod(run)


def compiled_nodes(outputs: Iterable[object]) -> list[Any]:
    """Return the autograd nodes of the compiled graphs that have made ``outputs``, or their bases.

    A node is the ``ctx`` of its backward, and can have attributes.
    """
    nodes = [value.grad_fn for value in outputs if isinstance(value, torch.Tensor)]
    direct = [node for node in nodes if _is_compiled(type(node))]
    # Not of compiled nodes: ``next_functions`` has one for each parameter, and takes as long.
    views = [node for node in nodes if node is not None and node not in direct]
    bases = [node for view in views for node, _ in view.next_functions]
    return direct + [node for node in bases if _is_compiled(type(node))]


def _is_compiled(node_type: Any) -> bool:
    return getattr(getattr(node_type, "_forward_cls", None), "__name__", "") == "CompiledFunction"


def saved_tensors(node: Any) -> list[torch.Tensor]:
    """Return what one of ``compiled_nodes`` has saved for backward.

    AOTAutograd keeps what a user's ``autograd.Function`` has saved in a list of its own, whose
    versions autograd does not compare.
    """
    return [*node.saved_tensors, *node._tensors_no_vc_check]


def saves_as_is() -> bool:
    """Return whether autograd saves tensors themselves: no hook packs them into something else.

    ``saved_tensors_hooks`` in torch/autograd/graph.py. What a hook of ``torch.utils.checkpoint``
    has packed is computed again when it is read.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is None


@functools.cache
def route_inputs(
    leaves_of: Callable[[object, bool], Sequence[Any] | None],
    gradient_of: Callable[[Any, torch.Tensor | None], torch.Tensor | None],
) -> None:
    """Have ``torch.autograd.grad`` and ``backward(inputs=)`` take other tensors for some inputs.

    ``torch.compiler`` replaces the same function in both modules while it traces.

    Args:
        leaves_of: returns, of an input and whether its gradient is accumulated, the tensors in its
            place, just one where it is not; None: the input stays.
        gradient_of: returns the gradient of such an input, made of that of its leaf.
    """
    run = torch.autograd.graph._engine_run_backward

    @functools.wraps(run)
    def run_backward(
        outputs: Any, grads: Any, retain: Any, create: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        accumulates = kwargs.get("accumulate_grad", False)
        leaves = [leaves_of(value, accumulates) for value in inputs]
        given = [
            leaf for value, own in zip(inputs, leaves) for leaf in ([value] if own is None else own)
        ]
        results = run(outputs, grads, retain, create, tuple(given), *args, **kwargs)
        if accumulates:
            return results
        return tuple(
            result if own is None else gradient_of(value, result)
            for value, own, result in zip(inputs, leaves, results)
        )

    torch.autograd.graph._engine_run_backward = run_backward  # type: ignore[assignment]
    torch.autograd._engine_run_backward = run_backward  # type: ignore[assignment]


def _acting_on_errors(
    backward: Callable[..., object], act: Callable[[BaseException], None]
) -> Callable[..., object]:
    @functools.wraps(backward)
    def run(*args: object) -> object:
        try:
            return backward(*args)
        except BaseException as error:
            act(error)
            raise

    return run
