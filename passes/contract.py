"""Passes: functions ``(gm, context)`` that rewrite ``gm`` in place, and their contracts.

A contract states a pass's stage, and the facts about a graph that the pass requires and provides;
``ordered`` checks contracts. Passes leave decisions to callables in the context, which have access
to the planner and the options.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from torch import fx

from graphshard.cost.model import CostModel
from graphshard.kinds import GraphKind
from graphshard.planning.offload import SavedActivation
from graphshard.planning.plan import Bucket, Plan, PlanParam, Problem, Regions, Transfer


class Stage(StrEnum):
    """Points of a compilation at which passes run, in order."""

    TRACED = "traced"  # Dynamo's graph
    JOINT = "joint"  # forward and backward in one graph
    PARTITIONED = "partitioned"  # the forward graph; the backward graph is in the context
    FINAL = "final"  # a forward, backward or inference graph
    LOWERED = "lowered"  # the same graph with its collectives, before the compiler's other passes


class Fact(StrEnum):
    """Facts about a graph that one pass establishes and later passes rely on."""

    INLINED = "marked regions are inlined"
    READS_OUTSIDE = "parameters are read outside the operators that AOTAutograd keeps"
    ONE_GRAPH = "no node calls a shared layer's subgraph"
    ONE_MARKER = "each parameter has one gather and one reduction"
    WIRE_DTYPES = "markers have their wire dtypes"
    GATHERS_KNOWN = "markers record what backward gathers again"
    TAGGED = "nodes are tagged for the partitioner"
    HELD_BYTES = "inputs of backward record the bytes that they keep alive"
    KEPT = "parameters that stay unsharded are saved"
    NORMALIZED = "nodes are where the planner expects them"
    LOWERED = "collectives are launched and waited for as planned"


@dataclass
class PassContext:
    """Inputs and results of passes, other than the graph itself.

    A pass that needs one of the functions below does not run if that function is None.

    Attributes:
        kind: kind of the graph; None before ``Stage.FINAL``.
        backward: backward graph, in ``Stage.PARTITIONED``.
        num_outputs: number of the forward graph's outputs that precede the saved values.
        ranks_differ: whether ranks may have different activation budgets.
        choose_kept: function that chooses parameters to keep unsharded, from
            ``planning.keep_unsharded``.
        choose_offloaded: function that chooses activations to offload, from ``planning.offload``.
        plan_buckets: function that plans the buckets of a graph, from ``planning.search``.
        is_worth_sharing: function that decides whether to compile equal regions once, from
            ``planning.repeats``.
        num_shared_layers: number of layers that became calls of a shared subgraph.
        kept: names of the forward nodes that ``keep_gathered`` saves unsharded.
        plan: plan of the graph, once ``lower`` has run.
        regions: counts of the regions that became calls of subgraphs.
    """

    cost_model: CostModel
    kind: GraphKind | None = None
    backward: fx.GraphModule | None = None
    num_outputs: int = 0
    ranks_differ: bool = False
    choose_kept: (
        Callable[[Problem, Problem, Mapping[int, Transfer], CostModel], Sequence[int]] | None
    ) = None
    choose_offloaded: (
        Callable[[Problem, Problem, Sequence[SavedActivation], CostModel], Sequence[int]] | None
    ) = None
    plan_buckets: Callable[[Problem, Sequence[PlanParam], CostModel], tuple[Bucket, ...]] | None = (
        None
    )
    is_worth_sharing: Callable[[Regions], bool] | None = None
    num_shared_layers: int = 0
    kept: Sequence[str] = ()
    plan: Plan | None = None
    regions: Regions = field(default_factory=Regions)

    @property
    def backward_graph(self) -> fx.Graph:
        assert self.backward is not None, f"only in stage {Stage.PARTITIONED}"
        return self.backward.graph


@dataclass(frozen=True)
class Pass:
    """A pass and its contract.

    Attributes:
        inference_only: whether the pass runs only on inference graphs, which have no joint graph.
        when: function that returns whether a context enables the pass.
        dump: name of the code dump, in which "{kind}" stands for the kind of graph; "" for the
            stage's own dump, if any. Consecutive passes with the same ``dump`` share one.
    """

    run: Callable[[fx.GraphModule, PassContext], None]
    stage: Stage
    requires: tuple[Fact, ...] = ()
    provides: tuple[Fact, ...] = ()
    when: Callable[[PassContext], bool] = lambda context: True
    inference_only: bool = False
    dump: str = ""

    @property
    def name(self) -> str:
        return self.run.__name__

    def runs(self, context: PassContext) -> bool:
        infers = context.kind == GraphKind.INFERENCE
        return (infers or not self.inference_only) and self.when(context)


def ordered(*passes: Pass) -> tuple[Pass, ...]:
    """Check the order of ``passes`` and return them.

    Raises:
        ValueError: a pass comes after one of a later stage, or requires a fact that no earlier pass
            provides.
    """
    stages = list(Stage)
    for one, following in itertools.pairwise(passes):
        if stages.index(following.stage) < stages.index(one.stage):
            raise ValueError(
                f"pass {following.name} of stage {following.stage} comes after pass {one.name} of "
                f"the later stage {one.stage}: move it before that pass"
            )
    _check_facts("training", [one for one in passes if not one.inference_only])
    # Inference has no joint graph and no partition.
    infers = [one for one in passes if one.stage not in (Stage.JOINT, Stage.PARTITIONED)]
    _check_facts("inference", infers)
    return passes


def _check_facts(purpose: str, passes: Sequence[Pass]) -> None:
    established = set[Fact]()
    for one in passes:
        missing = [f'"{fact}"' for fact in one.requires if fact not in established]
        if missing:
            raise ValueError(
                f"pass {one.name} requires {', '.join(missing)}, which no earlier pass "
                f"provides in graphs for {purpose}: move {one.name} after a pass that does"
            )
        established.update(one.provides)
