"""Run the passes of a stage: time each pass, then check the graphs and dump their code."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence

from torch import fx

from .. import passes
from ..cost.model import CostModel
from ..kinds import GraphKind
from ..ops.nodes import erase_unused, graph_modules
from ..passes.build_problem import build_problem
from ..passes.contract import PassContext, Stage
from ..passes.describe import number_params
from ..planning.plan import PlanParam, Problem
from ..show.dump_folder import DumpWriter
from .verify import verify_lowered

_log = logging.getLogger(__name__)
# Names of the dumps of whole stages; in other stages, only passes with a ``dump`` are dumped.
_DUMPS = {Stage.JOINT: "joint", Stage.FINAL: "{kind}"}


def run_stage(
    stage: Stage, gm: fx.GraphModule, context: PassContext, writer: DumpWriter | None = None
) -> None:
    """Run and time the passes of a stage that ``context`` enables, and check the results.

    Graphs with a plan are linted and verified against it. Graphs without one are linted, except in
    ``Stage.FINAL`` and ``Stage.LOWERED``, after which the compiler lints them.

    Args:
        gm: graph that the stage rewrites, in place; the forward graph in ``Stage.PARTITIONED``.
        writer: writer that dumps the code before and after the passes, if any.
    """
    writer = writer or DumpWriter()
    due = [one for one in passes.PIPELINE if one.stage == stage and one.runs(context)]
    for dump, group in itertools.groupby(due, lambda one: one.dump or _DUMPS.get(stage, "")):
        parts = _parts(stage, gm, context)
        for kind, part in parts.items() if dump else ():
            writer.write_code(dump.format(kind=kind), "before", part.graph)
        for one in group:
            start_s = time.perf_counter()
            one.run(gm, context)
            if stage == Stage.JOINT:
                erase_unused(gm.graph)
            _log.debug("%s: %.1f ms", one.name, 1e3 * (time.perf_counter() - start_s))
        for kind, part in parts.items():
            _check(part, stage, context)
            if dump:
                writer.write_code(dump.format(kind=kind), "after", part.graph)


def read_problems(
    graph: fx.Graph, kind: GraphKind, cost_models: Sequence[CostModel]
) -> tuple[tuple[PlanParam, ...], list[Problem]]:
    """Run the final passes except ``lower``, in place; build a problem for each cost model.

    Returns:
        The parameters, and one problem for each of ``cost_models``.
    """
    gm = graph.owning_module
    assert gm is not None
    run_stage(Stage.FINAL, gm, PassContext(cost_models[0], kind))
    params, param_of = number_params(graph)
    return params, [build_problem(graph, kind, m, param_of).problem for m in cost_models]


def _parts(
    stage: Stage, gm: fx.GraphModule, context: PassContext
) -> dict[GraphKind | None, fx.GraphModule]:
    if stage != Stage.PARTITIONED:
        return {context.kind: gm}
    assert context.backward is not None
    return {GraphKind.FORWARD: gm, GraphKind.BACKWARD: context.backward}


def _check(gm: fx.GraphModule, stage: Stage, context: PassContext) -> None:
    if context.plan is not None:
        verify_lowered(gm.graph, context.plan)
    if stage in (Stage.FINAL, Stage.LOWERED):  # the compiler lints it next
        return
    gm.graph.lint()
    if stage == Stage.TRACED:  # AOTAutograd runs the code; after other stages, only nodes are read
        for part in graph_modules(gm):
            part.recompile()
