"""Compile a Dynamo graph, agree on plans, and compile again if this rank's plan differs.

    Dynamo graph ─► AOTAutograd ─► joint passes, partition ─► forward, backward ─► lower ─► compiler
                                                                                      │
                        differs from the first rank's plan? compile again with it ◄─ plans

``Partitioner`` and ``Lowering`` hook our passes into AOTAutograd and Inductor.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import fx

from .._torch.aot_graphs import derive_schemas_once, forbid_effects, graph_kind, keep_subgraphs
from .._torch.cpp_kernels import few_cpp_files
from .._torch.distributed import group_timeout_s, process_group
from .._torch.dynamo import compile_id
from .._torch.inductor import (
    KEEP_HOST_COPIES,
    aot_autograd,
    compile_rewritten,
    donate_nothing,
    eager_backward,
    make_boxed_func,
    options_of_plans,
    read_partitioned,
    replaced_passes,
    with_planned_order,
    without_cuda_graphs,
)
from .._torch.unused_work import generate_code
from ..cpython_tuning import with_stack_room
from ..errors import BackendError
from ..kinds import GraphKind
from ..ops.in_flight import wait_in_flight_on_error
from ..passes.contract import Stage
from ..passes.inline_layers import LayersDiffer, check_inlined, keep_calls
from ..passes.layers import SHARED_LAYER
from ..passes.traced import inline_regions
from ..planning.live_bytes import gathered_bytes
from ..planning.plan import Plan
from ..progress import is_logged, report
from ..ranks.plan_consensus import PlanConsensus, collectives_text, log_every_call
from ..show.dump import Dump
from ..show.dump_folder import DumpWriter
from .cache_files import PlanCache, warn_unless_loaded
from .choose_saving import ChosenSaving, choose_saving
from .partition import Partitioner
from .run_passes import run_stage
from .settings import CompileSettings, baked_in
from .traced_graph import Runnable, TracedGraph

_T = TypeVar("_T")

_WAIT_S = 120.0  # timeout for graphs without a process group


@dataclass(frozen=True)
class CompiledGraph:
    """The plans and properties of a compiled graph."""

    plans: tuple[Plan, ...]  # plans of forward and backward, or of inference, with parameter names
    settings: CompileSettings
    compile_id: str  # Dynamo's name for the compilation, such as "0/0", or ""
    tried: str = ""  # table of the candidates of ``SchedulePolicy.auto``
    seconds: float = 0.0  # wall time of the compile, including waits for other ranks
    has_loaded: bool = False  # whether one of its graphs came from Inductor's cache
    num_shared_layers: int = 0  # number of layers that AOTAutograd traced as one
    is_latest: Callable[[], bool] | None = None  # whether it may run: see ``ChosenSaving``

    def max_gathered_bytes(self) -> int:
        by_step = (gathered_bytes(plan.problem, plan.buckets) for plan in self.plans)
        return max((num_bytes for graph in by_step for num_bytes in graph), default=0)

    def trains(self) -> bool:
        return any(plan.graph != GraphKind.INFERENCE for plan in self.plans)

    def peak_us(self, num_forwards: int, num_backwards: int) -> float:
        """Return the microseconds of matrix products, attention and convolutions at peak rates."""
        return sum(
            (num_backwards if plan.graph == GraphKind.BACKWARD else num_forwards)
            * plan.problem.peak_us
            for plan in self.plans
        )

    @functools.cached_property
    def dumps(self) -> list[Dump]:
        """Dumps of the plans, cached because a logger may read them at every step."""
        return [_dump_of(plan, self.settings, self.compile_id) for plan in self.plans]


@with_stack_room
def compile_traced(
    traced: TracedGraph, settings: CompileSettings, consensus: PlanConsensus, writer: DumpWriter
) -> tuple[Runnable, CompiledGraph]:
    """Compile a Dynamo graph with plans that all ranks follow.

    If the graphs communicate, their groups' call logs record every call to the result.

    Raises:
        BackendError: ranks compile graphs with different communication, a rank has left or does
            not arrive in time, no schedule fits the memory budget, or the user has set an option
            of Inductor that this backend needs for its own passes.
        ValueError: as :func:`choose_saving`.
    """
    start_s = time.perf_counter()
    options: Mapping[str, Any] = {}
    if settings.compiler == "inductor":
        options = traced.inductor_options
        if replaced := replaced_passes(options):
            raise BackendError(
                f"{replaced[0]} is set, but this backend needs its own: remove it from the options "
                "of torch.compile and from torch._inductor.config"
            )
    facts = baked_in(
        traced.inputs, traced.marker_groups, settings.device, options, traced.tp_groups
    )
    settings = dataclasses.replace(settings, baked_in=facts)

    def choose_and_compile() -> tuple[Runnable, CompiledGraph, ChosenSaving]:
        chosen = choose_saving(traced, settings, consensus, writer)
        return *_compile(traced, chosen.settings, writer), chosen

    (run, compiled, chosen), num_layers = _share_layers(traced, settings, choose_and_compile)
    if any(plan.buckets for plan in compiled.plans):
        report("comparing plans with other ranks")
    plans = consensus.common_plans(compiled.plans, chosen.context, traced.groups)
    if collectives_text(plans) != collectives_text(compiled.plans):
        report("compiling again with the first rank's plans")
        run, compiled = _compile(traced, chosen.settings.following(plans), writer)
        _warn_over_budget(compiled)
    run = wait_in_flight_on_error(run)
    run = log_every_call(run, compiled.plans, traced.groups)
    seconds = time.perf_counter() - start_s
    compiled = dataclasses.replace(
        compiled,
        tried=chosen.tried,
        seconds=seconds,
        num_shared_layers=num_layers,
        is_latest=chosen.is_latest,
    )
    if is_logged():
        report(_result(compiled))
    return run, compiled


def _result(compiled: CompiledGraph) -> str:
    loaded = "loaded from Inductor's cache" if compiled.has_loaded else "compiled"
    totals = [dump.totals for dump in compiled.dumps]
    ms, exposed_ms = (
        sum(getattr(one, name) for one in totals) / 1e3 for name in ("total_us", "all_exposed_us")
    )
    return (
        f"{loaded} in {compiled.seconds:.1f} s; predicted: {ms:.1f} ms, with "
        f"{exposed_ms:.1f} ms of exposed communication"
    )


def _share_layers(
    traced: TracedGraph, settings: CompileSettings, act: Callable[[], _T]
) -> tuple[_T, int]:
    """Run the passes on the traced graph, then ``act``, which traces it with AOTAutograd.

    If that raises ``LayersDiffer``, inline the shared layers and run ``act`` again.

    Returns:
        The result of ``act``, and the number of layers that were traced as one.
    """
    keep_subgraphs(keep_calls)
    derive_schemas_once(SHARED_LAYER)
    forbid_effects(SHARED_LAYER, LayersDiffer)
    context = settings.pass_context()
    run_stage(Stage.TRACED, traced.gm, context)
    try:
        return act(), context.num_shared_layers
    except LayersDiffer:
        inline_regions(traced.gm, context)
        traced.gm.recompile()
        return act(), 0


def _warn_over_budget(compiled: CompiledGraph) -> None:
    budget = compiled.settings.schedule.limits().peak
    for dump in compiled.dumps:
        needed = dump.totals.peak_bytes
        if budget is not None and needed > budget:
            warnings.warn(
                f"graphshard: memory_budget_gb={budget / 1e9:.3g}: the {dump.plan.graph} graph of "
                f"this rank needs {needed / 1e9:.3g} GB, because its gathers are planned for the "
                "first rank's smaller batch: use batches of similar size, or a smaller budget",
                stacklevel=2,
            )


def _compile(
    traced: TracedGraph, settings: CompileSettings, writer: DumpWriter
) -> tuple[Runnable, CompiledGraph]:
    lowering = Lowering(traced, settings, writer)
    cache = lowering.cache
    warn_unless_loaded(cache.key)
    kinds = "forward and backward" if traced.trains() else "inference"
    report(f"tracing {kinds} of {len(traced.gm.graph.nodes)} nodes")
    # A dump shows code only if the passes run on this rank: do not wait for another rank's compile.
    with cache.compiling(0.0 if writer.dumps else _half_timeout_s(traced.groups)):
        run = _compile_graphs(traced, lowering, traced.inductor_options)
    plans = lowering.known_plans()
    has_code = not (writer.dumps and lowering.has_loaded) or writer.write_all(cache.load_code())
    if not has_code or not _is_complete(plans):  # files may be deleted or damaged
        uncached = {**traced.inductor_options, "force_disable_caches": True}
        run = _compile_graphs(traced, lowering, uncached)
        plans = lowering.known_plans()
    if writer.code and lowering.lowered:  # passes ran
        cache.save_code(writer.code)
    named = tuple(plan.named(traced.fqns) for plan in plans)
    has_loaded = lowering.has_loaded
    return run, CompiledGraph(named, settings, lowering.compile_id, has_loaded=has_loaded)


def _half_timeout_s(groups: Sequence[str]) -> float:
    # Stop waiting for the lock before the ranks that wait for this one reach the group's timeout.
    timeouts = (group_timeout_s(process_group(name)) for name in groups)
    return min(timeouts, default=_WAIT_S) / 2


def _is_complete(plans: Sequence[Plan]) -> bool:
    kinds = {plan.graph for plan in plans}
    return GraphKind.INFERENCE in kinds or {GraphKind.FORWARD, GraphKind.BACKWARD} <= kinds


def _dump_of(plan: Plan, settings: CompileSettings, compile_id: str) -> Dump:
    hardware = settings.cost_model().hardware
    return Dump(plan, hardware, settings.schedule.limits(), compile_id)


def _compile_graphs(
    traced: TracedGraph, lowering: Lowering, inductor_options: Mapping[str, Any]
) -> Runnable:
    with eager_backward():  # all plans must be known before any communication
        if lowering.settings.compiler == "inductor":
            return _by_inductor(traced, lowering, inductor_options)
        return _by_aten(traced, lowering)


def _by_inductor(
    traced: TracedGraph, lowering: Lowering, inductor_options: Mapping[str, Any]
) -> Runnable:
    settings = lowering.settings
    # Torch disables its caches for a pass without a key, but not for a partitioner without one.
    uncached = {} if settings.caches_graphs else {"force_disable_caches": True}
    patches = {
        **options_of_plans(settings.device, lowering.report_code),
        **with_planned_order(inductor_options),
        **uncached,
        **(KEEP_HOST_COPIES if settings.may_offload_activations else {}),
        "custom_partitioner_fn": Partitioner(settings, lowering.writer),  # part of cache keys
    }
    if settings.device.type == "cuda":
        patches = without_cuda_graphs(patches, traced.gm.meta)
    few_files = few_cpp_files(num_graphs=2 if traced.trains() else 1)
    with few_files if settings.device.type == "cpu" else nullcontext():
        run: Runnable = compile_rewritten(traced.gm, traced.inputs, lowering, patches)
        if lowering.lowered:
            report("compiling kernels")  # ``few_files`` waits for them
            if settings.device.type == "cpu" and gc.isenabled():
                gc.collect()  # here rather than later, because the C++ compiler runs meanwhile
    return run


def _by_aten(traced: TracedGraph, lowering: Lowering) -> Runnable:
    """Compile with the passes of ``_by_inductor``, into graphs that run op by op."""

    def lower_and_run(gm: fx.GraphModule, _: Sequence[object]) -> Runnable:
        lowering(gm)
        generate_code(gm)
        # Not ``gm`` itself: calling it drops the traceback of an error, and with it the local
        # variables in which ``wait_in_flight_on_error`` finds collectives in flight.
        return make_boxed_func(gm.forward)

    partition = Partitioner(lowering.settings, lowering.writer)
    compiler = aot_autograd(fw_compiler=lower_and_run, partition_fn=partition)
    run: Runnable = compiler(traced.gm, traced.inputs)
    return run


class Lowering:
    """Hook that plans and lowers each partitioned graph; keeps its plan in memory and in files.

    Attributes:
        has_loaded: whether a graph came from Inductor's cache, so its plan was read from a file.
        lowered: kind of the graph that was lowered last, or "".
    """

    def __init__(self, traced: TracedGraph, settings: CompileSettings, writer: DumpWriter) -> None:
        self.settings, self.writer, self._fqns = settings, writer, traced.fqns
        self.cache = PlanCache(traced.gm, settings)
        self.compile_id = compile_id()
        self.has_loaded = False
        self._plans: dict[GraphKind, Plan] = {}
        self.lowered = ""
        self._num_regions = 0  # distinct regions of the last graph

    def __call__(self, gm: fx.GraphModule) -> None:
        kind = GraphKind(graph_kind(gm.graph))
        check_inlined(gm)
        context = self.settings.pass_context(kind)
        report(f"{kind}: planning")
        run_stage(Stage.FINAL, gm, context, self.writer)
        run_stage(Stage.LOWERED, gm, context)
        if context.regions.num_calls:
            self.writer.write_code(f"regions-{kind}", "after", gm.graph)
        assert context.plan is not None
        plan = self._plans[kind] = dataclasses.replace(context.plan, regions=context.regions)
        self.lowered, self._num_regions = str(kind), context.regions.num_compiled_regions
        if plan.params:
            buckets = "1 bucket" if len(plan.buckets) == 1 else f"{len(plan.buckets)} buckets"
            report(f"{kind}: planned {len(plan.params)} parameters in {buckets}")
        # Save the plan before the compile ends: once the graph is in Inductor's cache, another
        # process may load it and need the plan. Dump the plan now in case the compiler fails.
        self.cache.save(plan)
        self._dump(plan)
        donate_nothing()

    def report_code(self, graph_name: str) -> None:
        region = re.search(r"region_(\d+)$", graph_name)
        what = f"region {int(region[1]) + 1} of {self._num_regions}" if region else "the graph"
        report(f"{self.lowered}: compiling {what}")

    def known_plans(self) -> list[Plan]:
        """Load the plans of cached graphs that have plan files; return all known plans."""
        for kind in GraphKind:
            if kind not in self._plans and (plan := self.cache.load(kind)) is not None:
                self.has_loaded = True
                self._plans[kind] = plan
                self._dump(plan)
        return [self._plans[kind] for kind in GraphKind if kind in self._plans]

    def _dump(self, plan: Plan) -> None:
        self.writer.write_plan(_dump_of(plan.named(self._fqns), self.settings, self.compile_id))


# --- tracing without compiling --------------------------------------------------------------------

# Reads a forward, backward or inference graph before it is lowered.
Read = Callable[[fx.Graph, GraphKind], None]


def trace_only(traced: TracedGraph, settings: CompileSettings, read: Read) -> Runnable:
    """Trace a Dynamo graph and call ``read`` with each graph that would be lowered.

    The returned callable computes nothing: see ``read_partitioned``.
    """
    options: dict[str, Any] = {
        **options_of_plans(settings.device),
        "custom_partitioner_fn": Partitioner(settings, DumpWriter()),
    }

    def read_part(gm: fx.GraphModule) -> None:
        check_inlined(gm)
        read(gm.graph, GraphKind(graph_kind(gm.graph)))

    def trace() -> Runnable:
        run: Runnable = read_partitioned(traced.gm, traced.inputs, read_part, options)
        return run

    with eager_backward():
        return _share_layers(traced, settings, trace)[0]
