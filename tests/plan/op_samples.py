"""Price torch's own operator test samples, and print errors as JSON.

    python -m tests.plan.op_samples

Runs in a separate process, because importing torch's samples freezes global settings and requires a
package that only torch's own tests need.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
import types
import unittest
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.flop_counter import flop_registry

from graphshard.cost.flops import flops
from graphshard.cost.fusion import FUSED, GraphValues, NodeKind, UnmaterializedValues
from graphshard.cost.model import CostModel
from tests.plan.machines import MACHINE, flat_rate

NUM_SAMPLES = 2  # per operator
MOVES = dataclasses.replace(MACHINE, flops={"float32": flat_rate(1e18)}, special_per_s=1e18)
"""A machine where only bytes and launches take time."""


def _operators() -> list[Any]:
    missing = types.ModuleType("expecttest")
    missing.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules.setdefault("expecttest", missing)
    from torch.testing._internal.common_methods_invocations import op_db

    return [info for info in op_db if torch.float32 in info.supported_dtypes("cpu")]


def _graphs(info: Any) -> Iterator[fx.Graph]:
    # Instead of info.sample_inputs, which reads the source of all frames for each sample.
    samples = info.sample_inputs_func(info, "cpu", torch.float32, requires_grad=False)
    for sample in itertools.islice(samples, NUM_SAMPLES):
        leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))

        def call(*tensors: Tensor, leaves: Any = leaves, spec: Any = spec) -> Any:
            given = iter(tensors)
            filled = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            first, args, kwargs = tree_unflatten(filled, spec)
            return info.op(first, *args, **kwargs)

        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        try:
            yield make_fx(call, tracing_mode="fake")(*tensors).graph
        except Exception:  # data-dependent, or needs a GPU
            continue


def _faults(graph: fx.Graph) -> Iterator[str]:
    times = CostModel(MOVES).compute_us(graph)
    wrong = [f"{node.target}: {us} us" for node, us in times.items() if not 0 <= us < math.inf]
    yield from wrong
    values = GraphValues(graph)
    kernels = [n for n, k in values.kinds.items() if k not in (NodeKind.VIEW, NodeKind.BARRIER)]
    total, least = sum(times.values()), _written(graph, values, kernels)
    most = sum(_moved(node, values) + MOVES.launch_us for node in kernels)
    # A byte takes one microsecond; flops take almost no time.
    if not least <= total <= most + 1e-3:
        yield f"{graph}: {total} us, not from {least} to {most}"
    yield from _faults_of_memory(values, CostModel(MOVES).unmaterialized(values))
    for node in kernels:
        counts = flop_registry.get(getattr(node.target, "overloadpacket", None))
        if counts is not None and "attention" not in str(node.target):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            expected = counts(*args, **kwargs, out_val=node.meta["val"])
            if flops(node).num_flops != expected:
                yield f"{node.format_node()}: {flops(node).num_flops} flops, not {expected}"


def _faults_of_memory(values: GraphValues, without: UnmaterializedValues) -> Iterator[str]:
    """Yield errors for values wrongly classified as unmaterialized, or classified twice.

    A value is in memory if its node is not fused, or if a barrier reads it.
    """
    for node in without.inside | without.inlined:
        read_by = {values.kinds[user] for user in values.users(node)}
        if values.kinds[node] not in FUSED or NodeKind.BARRIER in read_by:
            yield f"{node.format_node()} is in memory"
    if without.inside & without.inlined:
        yield f"{without.inside & without.inlined} are twice without memory"


def _written(graph: fx.Graph, values: GraphValues, kernels: list[fx.Node]) -> float:
    returned = graph.output_node().all_input_nodes
    roots = {values.roots[node] for node in returned}
    return sum(values.num_bytes[node] for node in kernels if node in roots)


def _moved(node: fx.Node, values: GraphValues) -> float:
    return values.num_bytes[node] + sum(values.num_bytes[n] for n in node.all_input_nodes)


def main() -> None:
    num_graphs, faults = 0, []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for info in _operators():
            for graph in _graphs(info):
                num_graphs += 1
                faults += [f"{info.name}: {fault}" for fault in _faults(graph)]
    faults += [str(w.message) for w in caught if str(w.message).startswith("graphshard:")]
    print(json.dumps({"graphs": num_graphs, "faults": faults}))


if __name__ == "__main__":
    main()
