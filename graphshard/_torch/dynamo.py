"""Dynamo: what a backend may raise, the frame that is being traced, guards, and graph breaks.

Read in torch/_dynamo: exc.py, output_graph.py, symbolic_convert.py, guards.py, callback.py, utils.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.eval_frame import innermost_backend, skip_code
from torch._dynamo.exc import ShortenTraceback, TensorifyScalarRestartAnalysis
from torch._dynamo.source import AttrSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import counters
from torch._guards import ChainedSource, CompileContext, Guard, Source

__all__ = ["ShortenTraceback", "innermost_backend"]


class Retrace(TensorifyScalarRestartAnalysis):
    """Makes Dynamo trace the frame again. It passes through ``OutputGraph.call_user_compiler``."""

    def __init__(self, reason: str) -> None:
        super().__init__(restart_reason=reason)


RESUMED = "torch_dynamo_resume_in_"


class Trace:
    """The frame that Dynamo is tracing while it calls the backend."""

    def __init__(self) -> None:
        self._tx: Any = InstructionTranslator.current_tx()

    def retrace(self, reason: str) -> Retrace:
        """The exception to raise; what an earlier trace speculated does not hold any more."""
        self._tx.speculation_log.clear()
        return Retrace(reason)

    def value(self, source: Source) -> Any:
        return source.get_value({"G": self._tx.f_globals, "L": self._tx.f_locals}, {}, {})

    def owners(self, source: Source) -> Iterator[Any]:
        """What ``source`` is an attribute or item of, outermost object first."""
        chain = [source]
        while isinstance(chain[-1], ChainedSource):
            chain.append(chain[-1].base)
        for link in reversed(chain[1:]):
            try:
                yield self.value(link)
            except Exception:  # a source that Dynamo cannot evaluate outside its guards
                continue

    def owner(self) -> nn.Module | None:
        """The module whose method is being traced, if it is one."""
        owner = self._tx.f_locals.get("self")
        return owner if isinstance(owner, nn.Module) else None

    def is_resumed(self) -> bool:
        """Whether the frame goes on after a graph break."""
        return self._tx.f_code.co_name.startswith(RESUMED)

    def graph_break(self) -> str | None:
        """``file:line: reason`` if this graph ends in a break, else None."""
        reason = self._tx.output.compile_subgraph_reason
        if reason is None or not reason.graph_break:
            return None
        where = reason.user_stack[-1] if reason.user_stack else None
        first_line = reason.reason.strip().splitlines()[0] if reason.reason.strip() else "?"
        return f"{where.filename}:{where.lineno}: {first_line}" if where else first_line

    def guard(self, source: Source, attribute: str, holds: Callable[[Any], bool]) -> None:
        """Guard the frame on ``holds(source.attribute)``, evaluated at every call.

        On an attribute, because Dynamo may skip guards on a tensor itself while the dictionaries
        that lead to it have not changed (``find_tag_safe_roots`` in torch/_dynamo/guards.py).
        """
        text = f"graphshard: {source_name(source)} is in sync"

        def create(builder: Any, guard: Guard) -> None:
            builder.get_guard_manager(guard).add_lambda_guard(holds, [text], guard.user_stack)

        self._tx.output.guards.add(AttrSource(source, attribute).make_guard(create))


def on_compile_start(act: Callable[[Any], None]) -> None:
    """Have ``act`` called before Dynamo traces a frame, of whatever backend.

    ``torch._dynamo.reset()`` forgets it (torch/_dynamo/callback.py), so it is asked for repeatedly.
    """
    if act not in (handler := torch._dynamo.callback_handler).start_callbacks:
        handler.register_start_callback(act)


def run_as_python(function: Any) -> None:
    """Dynamo inlines ``function`` into traces, but never compiles a call of it from Python."""
    skip_code(function.__code__)


def graph_break_reasons() -> list[str]:
    """First lines of all reasons counted since the last reset (torch/_dynamo/utils.py)."""
    return [reason.splitlines()[0] for reason in counters["graph_break"]]


def sources(gm: fx.GraphModule) -> list[Source]:
    """The Dynamo source of every placeholder, in order."""
    return [n._dynamo_source for n in gm.graph.nodes if n.op == "placeholder"]


def source_name(source: Source) -> str:
    return source.name if isinstance(source.name, str) else source.name()


def compile_id() -> str:
    """Dynamo's name for the compilation that is under way, as in "0/0"; "" if there is none."""
    found = CompileContext.current_compile_id()
    return "" if found is None else str(found)
