"""Skip work of torch's compile stack whose result nothing reads.

Torch copies graphs for a minifier that is off, generates Python code of graphs that nothing runs,
and propagates fake tensors through unchanged graphs.

Relies on its imports and on torch/fx/graph.py.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch._dynamo.config
import torch._logging._internal
import torch.fx.graph
from torch import fx
from torch._dynamo.repro import after_aot
from torch._inductor import codecache, fx_utils
from torch.fx._lazy_graph_module import _LazyGraphModule

_Function = Callable[..., Any]


@contextlib.contextmanager
def without_unused_work() -> Iterator[None]:
    """Skip, in this context, work for logs that are off and for graphs that have not changed."""
    with ExitStack() as stack:

        def replace(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
            stack.enter_context(mock.patch.object(owner, name, wrap(getattr(owner, name))))

        # ``Graph.create_node`` iterates over all arguments, to warn of symbolic sizes among them.
        replace(fx.graph, "pytree", _iterating_over_nothing)
        replace(fx_utils.FakeTensorUpdater, "incremental_update", _unless_unchanged)
        replace(codecache.FxGraphCachePickler, "debug_lines", _if_cache_is_logged)
        if torch._dynamo.config.repro_after != "aot":  # which needs the copy of each graph
            replace(after_aot, "copy", _not_copying)
        yield


def _iterating_over_nothing(pytree: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(pytree), "tree_iter": lambda tree: ()})


def _not_copying(copy: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(copy), "deepcopy": lambda graph: graph})


def _unless_unchanged(update: _Function) -> _Function:
    # Unlike torch 2.11, torch 2.13 propagates through each call of a subgraph even so.
    @functools.wraps(update)
    def update_changed(updater: Any) -> Any:
        return 0 if _is_unchanged(updater) else update(updater)

    return update_changed


def _is_unchanged(updater: Any) -> bool:
    if not hasattr(updater, "subgraph_updaters"):  # torch 2.11
        return False
    hashes = map(updater.hash_node, updater.gm.graph.nodes)
    of_subgraphs = map(_is_unchanged, updater.subgraph_updaters.values())
    return all(one in updater.processed_hashes for one in hashes) and all(of_subgraphs)


def _if_cache_is_logged(debug_lines: _Function) -> _Function:
    @functools.wraps(debug_lines)
    def lines(pickler: Any, details: object) -> list[str]:
        is_logged = codecache.log.isEnabledFor(logging.DEBUG) or _is_traced()
        return debug_lines(pickler, details) if is_logged else []

    return lines


def _is_traced() -> bool:  # by TORCH_TRACE
    return bool(torch._logging._internal.trace_log.handlers)


def generating_code_later(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a module with the graph of ``gm`` that generates its code when it first runs."""
    return _LazyGraphModule.from_graphmodule(gm)


def generate_code(gm: fx.GraphModule) -> None:
    """Generate the Python code of a graph, so that ``gm.forward`` runs it without ``gm()``."""
    gm.recompile()
    _LazyGraphModule.force_recompile(gm)
