"""Dynamo: the frame being traced, guards, graph breaks and errors.

Relies on exc.py, output_graph.py, symbolic_convert.py, guards.py, callback.py, eval_frame.py,
source.py, types.py, utils.py and backends/registry.py in torch/_dynamo and on torch/_guards.py,
with the same names and arguments in torch 2.11 and 2.13. Errors in ``graphshard.errors`` derive
from ``ShortenTraceback``, because ``OutputGraph.call_user_compiler`` does not wrap such errors.
"""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch._dynamo.eval_frame import (
    _debug_get_cache_entry_list,
    set_code_exec_strategy,
    skip_code,
)
from torch._dynamo.exc import ShortenTraceback, TensorifyScalarRestartAnalysis
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import AttrSource, DictGetItemSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.types import FrameAction, FrameExecStrategy
from torch._dynamo.utils import counters
from torch._guards import ChainedSource, CompileContext, Guard, Source

from .frames import backend_of, is_resumed
from .patches import patch

__all__ = ["ShortenTraceback", "Source"]

_F = TypeVar("_F", bound=Callable[..., object])

set_grad_enabled = torch._C._set_grad_enabled  # called in graphs where a grad mode begins or ends


def log_only_errors() -> None:
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)


# If a backend, or AOTAutograd within it, raises this exception, Dynamo traces the frame again.
# Torch raises it when a float that Dynamo treated as a variable has to be a constant. Of Dynamo's
# restart exceptions, ``OutputGraph.call_user_compiler`` lets only this one pass.
Restart = TensorifyScalarRestartAnalysis


def capture_scalar_outputs() -> None:
    """Make Dynamo trace values that code moves to the host, as ``Tensor.tolist`` does."""
    torch._dynamo.config.capture_scalar_outputs = True


class Trace:
    """The frame that Dynamo is tracing while it calls the backend."""

    def __init__(self) -> None:
        self._tx = InstructionTranslator.current_tx()

    def retrace(self, reason: str) -> Restart:
        """Prepare Dynamo for a new trace, and return the exception to raise for it."""
        # The speculation log must match the trace, but the new trace may take other branches.
        self._tx.speculation_log.clear()
        return Restart(restart_reason=reason)

    def value(self, source: Source) -> object:
        """Return the object that ``source`` refers to; raise if only guards can evaluate it."""
        return source.get_value({"G": self._tx.f_globals, "L": self._tx.f_locals}, {}, {})

    def owners(self, source: Source) -> Iterator[object]:
        """Yield the objects that ``source`` is an attribute or item of, outermost first."""
        chain = [source]
        while isinstance(chain[-1], ChainedSource):
            chain.append(chain[-1].base)
        for owner_source in reversed(chain[1:]):
            try:
                yield self.value(owner_source)
            except Exception:  # Dynamo can evaluate this source only in its guards
                continue

    def owner(self) -> nn.Module | None:
        """Return the module whose method is being traced, or None for other functions."""
        owner = self._tx.f_locals.get("self")
        return owner if isinstance(owner, nn.Module) else None

    def backend(self) -> object:
        """Return the backend of the trace; see ``backend_of``."""
        return backend_of(self._tx.output.compiler_fn)

    def is_resumed(self) -> bool:
        return is_resumed(self._tx.f_code)

    def graph_break(self) -> str | None:
        """Return ``file:line: reason`` of the graph break that ends this graph, or None.

        If the line is unknown, the reason alone is returned.
        """
        # See ``GraphCompileReason`` in torch/_dynamo/output_graph.py.
        reason = self._tx.output.compile_subgraph_reason
        if reason is None or not reason.graph_break:
            return None
        where = reason.user_stack[-1] if reason.user_stack else None
        first_line = reason.reason.strip().splitlines()[0] if reason.reason.strip() else "?"
        return f"{where.filename}:{where.lineno}: {first_line}" if where else first_line

    def guard(self, source: Source, holds: Callable[[Any], bool], what: str) -> None:
        """Guard the frame on ``holds(tensor of source)``, evaluated at every call.

        ``holds`` runs before Dynamo's own guards on the tensor, and may change the tensor.
        ``what`` tells logs what must hold.
        """
        text = f"graphshard: {what}"

        def create(builder: GuardBuilder, guard: Guard) -> None:
            builder.get_guard_manager(guard).add_lambda_guard(holds, [text], guard.user_stack)

        guards = self._tx.output.guards
        # Guards on one source are sorted by the line number at which their ``create`` is defined
        # (``Guard.sort_key`` in torch/_guards.py): Dynamo's have larger numbers, in guards.py.
        guards.add(source.make_guard(create))
        # Dynamo may skip the guards on a tensor while the dictionaries that lead to it are
        # unchanged, but not if there is a guard on one of its attributes
        # (``find_tag_safe_roots`` in torch/_dynamo/guards.py).
        guards.add(AttrSource(source, "requires_grad").make_guard(GuardBuilder.TYPE_MATCH))


def on_compile_start(act: Callable[[object], None]) -> None:
    """Call ``act`` before Dynamo traces any frame, for any backend.

    ``torch._dynamo.reset()`` clears the callbacks (torch/_dynamo/callback.py): register ``act``
    again after any possible reset. It runs once per compilation, however often it is registered.
    """
    handler = torch._dynamo.callback_handler
    if act not in handler.start_callbacks:
        handler.register_start_callback(act)


def on_compile_end(act: Callable[[object], None]) -> None:
    """Call ``act`` after every compilation, even a failed one.

    A reset removes ``act``, as in `on_compile_start`.
    """
    handler = torch._dynamo.callback_handler
    if act not in handler.end_callbacks:
        handler.register_end_callback(act)


def on_lookup(name: str, act: Callable[[], None]) -> None:
    """Call ``act()`` whenever ``torch.compile`` looks up the backend ``name``."""

    # ``torch.compile`` uses nothing else of a named backend before the first compilation, which may
    # never come (``lookup_backend`` in torch/_dynamo/backends/registry.py).
    class Noticing(dict[str, Any]):
        def __getitem__(self, looked_up: str) -> Any:
            if looked_up == name:
                act()
            return super().__getitem__(looked_up)

    patch("torch._dynamo.backends.registry._COMPILER_FNS", Noticing)


def run_as_python(function: Callable[..., object]) -> None:
    """Let Dynamo inline ``function`` into traces, but never compile it when Python calls it."""
    skip_code(function.__code__)  # see torch/_dynamo/eval_frame.py


def run_with_callees_as_python(function: _F) -> _F:
    """Keep Dynamo from compiling ``function`` and its callees when Python calls ``function``.

    For backward hooks: if a compiled function calls ``backward()``, they run outside any graph, but
    with Dynamo enabled. Unlike ``torch.compiler.disable``, this adds no cost per call.
    """
    strategy = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, strategy)
    return function


def at_recompile_limit(code: CodeType) -> bool:
    """Return whether ``code`` has as many graphs as Dynamo's recompile limit allows.

    A call that fits none of these graphs then runs eagerly.
    """
    limit: int = torch._dynamo.config.recompile_limit
    return len(_debug_get_cache_entry_list(code)) >= limit


def saves_compiled_frames() -> bool:
    """Return whether Dynamo pickles the guards of each frame, to load it in another process."""
    return bool(torch._dynamo.config.caching_precompile)


def graph_break_reasons() -> list[str]:
    """Return the first line of each graph-break reason that Dynamo has counted in this process."""
    return [reason.splitlines()[0] for reason in counters["graph_break"]]


def sources(gm: fx.GraphModule) -> list[Source]:
    """Return the source of each placeholder's value, in placeholder order."""
    # ``OutputGraph`` stores it on the nodes (torch/_dynamo/output_graph.py).
    return [node._dynamo_source for node in gm.graph.nodes if node.op == "placeholder"]


def is_buffer(source: Source) -> bool:
    """Return whether ``source`` is a buffer of a module."""
    return module_of_entry(source, "_buffers") is not None


def module_of_entry(source: Source, table: str) -> Source | None:
    """Return the source of the module whose ``table`` holds the value of ``source``, or None."""
    holder = source.base if isinstance(source, DictGetItemSource) else None
    # ``module.<table>[name]`` or ``module.__dict__[table][name]``
    if isinstance(holder, DictGetItemSource) and holder.index == table:
        holder, table = holder.base, "__dict__"
    return holder.base if isinstance(holder, AttrSource) and holder.member == table else None


class _Captured(ShortenTraceback):
    """Raised to end a trace once its graph has been captured."""


_capturing = False


def is_capturing() -> bool:
    return _capturing


def capture_graph(call: Callable[[], object]) -> tuple[fx.GraphModule, list[Any]] | None:
    """Return the first graph that Dynamo captures from ``call()``, and its inputs.

    The graph is not run. Return None if Dynamo captures no graph; ``call()`` then runs as plain
    Python.
    """
    global _capturing
    captured: list[tuple[fx.GraphModule, list[Any]]] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        captured.append((gm, inputs))
        raise _Captured("captured", first_useful_frame=None)

    _capturing = True
    try:
        torch.compile(lambda: call(), backend=backend)()
    except _Captured:
        pass
    finally:
        _capturing = False
    return captured[0] if captured else None


def mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Make Dynamo trace a dimension of an input as a symbol, unless the code needs its value."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)


def compile_id() -> str:
    """Return Dynamo's ID of the compilation in progress, such as "0/0", or "" if there is none."""
    compiling = CompileContext.current_compile_id()
    return "" if compiling is None else str(compiling)


_CUTS = re.compile(
    r"\n*(from user code:|Set TORCHDYNAMO_VERBOSE|\s*Developer debug context:|\s*Hint: )"
)
_GOT = re.compile(r"got (\w+)\((['\"])(.*)\2\)", re.DOTALL)


def describe_error(error: BaseException) -> str:
    """Return the type and message of the original error, on one line."""
    while isinstance(inner := getattr(error, "inner_exception", None), BaseException):
        error = inner  # wrapped by a Dynamo error
    text = _CUTS.split(str(error), maxsplit=1)[0]
    name, is_dynamos = type(error).__name__, type(error).__module__.startswith("torch._dynamo")
    if is_dynamos and (found := _GOT.search(text)):
        name, text = found[1], found[3]
    return f"{name}: {' '.join(text.split())}".removesuffix(": ")


def frames_of(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of an error and of its chain of causes, then the frames of traced code.

    The frames of each error, and of traced code, end with the innermost one.
    """
    frames: list[traceback.FrameSummary] = []
    for one in _chain(error):
        frames += traceback.extract_tb(one.__traceback__)
    for one in _chain(error):
        frames += getattr(one, "real_stack", None) or []
    return frames


def _chain(error: BaseException) -> Iterable[BaseException]:
    following: BaseException | None = error
    while following is not None:
        yield following
        inner = getattr(following, "inner_exception", None)
        following = inner if isinstance(inner, BaseException) else following.__cause__
