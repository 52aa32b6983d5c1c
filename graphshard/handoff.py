"""Hands a traced graph to AOTAutograd and a compiler, with our passes in their places.

    Dynamo graph ─► AOTAutograd ─► joint passes, partition ─► forward, backward ─► lower ─► compiler

Both compilers run the same passes: ``inductor`` by its custom-pass hooks, which take part in its
cache keys, ``aot_eager`` by calling them on the graphs that it then runs op by op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._functorch.aot_autograd import make_boxed_func

import graphshard.passes as passes

from ._torch import (
    KEEP_ORDER,
    CustomGraphPass,
    CustomPartitionerFn,
    aot_autograd,
    cache_dir,
    compile_fx,
    min_cut_rematerialization_partition,
    source_hash,
)
from .plan import BACKWARD, FORWARD, INFERENCE, Plan
from .verify import verify_lowered, verify_partition

_SOURCES = sorted([*Path(__file__).parent.glob("*.py"), *Path(passes.__file__).parent.glob("*.py")])


class PlanRecord:
    """The plans of one Dynamo graph, as its passes ran; or as they ran when it was first compiled.

    A warm cache returns compiled graphs without running any pass, so the plans are kept beside
    Inductor's cache, under a key of the Dynamo graph.
    """

    def __init__(
        self, gm: fx.GraphModule, inputs: Sequence[Any], fqns: Sequence[str], compiler: str
    ) -> None:
        traced = [gm.print_readable(print_output=False), compiler, torch.__version__]
        # Not in the text, but AOTAutograd makes other graphs of it.
        traced += [str([getattr(value, "requires_grad", None) for value in inputs])]
        traced += [str(torch.is_grad_enabled())]
        self._key = source_hash(_SOURCES, "\n".join(traced)).hex()
        self._fqns = tuple(fqns)
        self._plans: dict[str, Plan] = {}

    def add(self, plan: Plan) -> None:
        self._plans[plan.graph] = plan
        path = self._path(plan.graph)
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{id(self)}.tmp")
        scratch.write_text(plan.to_json())
        scratch.replace(path)

    def plans(self) -> list[Plan]:
        """The plans known by now, parameters named: the backward's comes with its compilation."""
        for kind in (FORWARD, BACKWARD, INFERENCE):
            path = self._path(kind)
            if kind not in self._plans and path.exists():
                self._plans[kind] = Plan.from_json(path.read_text())
        return [plan.named(self._fqns) for plan in self._plans.values()]

    def _path(self, kind: str) -> Path:
        return Path(cache_dir()) / "graphshard" / f"{self._key}-{kind}.json"


class Partitioner(CustomPartitionerFn):
    """Runs the joint passes, then torch's min-cut partitioner, and checks what it saves."""

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        for joint_pass in passes.JOINT:
            joint_pass(gm)
        gm.graph.lint()
        gm.recompile()
        derived = [node.name for node in passes.parameter_derived(gm.graph)]
        forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        verify_partition(forward, derived, kwargs["num_fwd_outputs"])
        return forward, backward

    def uuid(self) -> bytes:
        return source_hash(_SOURCES, "partitioner")


class Lowering(CustomGraphPass):
    """Runs the graph pass on a forward, backward or inference graph, verifies and records it."""

    def __init__(self, record: PlanRecord) -> None:
        self._record = record

    def __call__(self, graph: fx.Graph) -> None:
        plan = passes.lower(graph, _kind(graph))
        verify_lowered(graph, plan)
        self._record.add(plan)

    def uuid(self) -> bytes:
        return source_hash(_SOURCES, "lowering")

    def __getstate__(self) -> dict[str, Any]:
        return {}  # what is pickled into a cache key is the uuid


def _kind(graph: fx.Graph) -> str:
    names = [node.target for node in graph.nodes if node.op == "placeholder"]
    if any(name.startswith("tangents_") for name in names):
        return BACKWARD
    return FORWARD if any(name.startswith("primals_") for name in names) else INFERENCE


def compile_graph(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    record: PlanRecord,
    compiler: str,
    patches: dict[str, Any],
) -> Callable[..., Any]:
    """A callable that runs ``gm`` sharded; ``patches`` are Inductor options of the user's."""
    lowering = Lowering(record)
    if compiler == "inductor":
        patches = {
            **KEEP_ORDER,
            **patches,
            "post_grad_custom_post_pass": lowering,
            "custom_partitioner_fn": Partitioner(),
        }
        compiled: Any = compile_fx(gm, inputs, config_patches=patches)
        return compiled

    def run_by_op(graph_module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        lowering(graph_module.graph)
        graph_module.recompile()
        return make_boxed_func(graph_module)

    return aot_autograd(fw_compiler=run_by_op, partition_fn=Partitioner())(gm, inputs)
