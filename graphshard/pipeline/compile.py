"""Hands a traced graph to AOTAutograd and a compiler, with our passes in their places.

    Dynamo graph ─► AOTAutograd ─► joint passes, partition ─► forward, backward ─► lower ─► compiler

Both compilers run the same passes: ``inductor`` by its custom-pass hooks, which take part in its
cache keys, ``aot_eager`` by calling them on the graphs that it then runs op by op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

import graphshard.passes as passes

from .._torch.dynamo import compile_id
from .._torch.inductor import (
    KEEP_COPIED,
    KEEP_ORDER,
    CustomGraphPass,
    CustomPartitionerFn,
    aot_autograd,
    cache_dir,
    compile_fx,
    donate_nothing,
    eager_backward,
    get_hash_for_files,
    make_boxed_func,
    min_cut_rematerialization_partition,
    saving_activations,
)
from ..consensus.plan_consensus import follow, kept_inputs
from ..cost.model import CostModel
from ..kinds import GraphKind
from ..options.schedule_policy import SchedulePolicy
from ..planning.activation_offload import SavedActivation, choose_offloaded
from ..planning.host_copies import add_host_copies, without_host_copies
from ..planning.keep_unsharded import choose_kept
from ..planning.plan import Bucket, Plan, Problem, Transfer
from ..show.dump import Dump
from ..show.dump_folder import DumpWriter
from .verify import verify_lowered, verify_partition

_FOLDERS = (Path(__file__).parents[1], Path(passes.__file__).parent)
_SOURCES = tuple(sorted({str(path) for folder in _FOLDERS for path in folder.rglob("*.py")}))


@dataclass(frozen=True)
class CompileSettings:
    """What graphs are compiled by, for, and how scheduled."""

    compiler: str
    schedule: SchedulePolicy
    device: torch.device
    offloads: bool = False
    """The host keeps shards."""
    followed: Mapping[GraphKind, Plan] = field(default_factory=dict)
    """By kind of graph, what another rank decided."""

    def fingerprint(self) -> str:
        """What compiled graphs depend on, as text."""
        hardware = self.schedule.cost_model(self.device).hardware.to_json()
        backend = dist.get_backend_config()
        where = f"{self.device.type} {self.offloads}"
        return f"{self.compiler} {self.schedule} {hardware} {backend} {where} {self.followed}"

    def uuid(self) -> bytes | None:
        """Of passes, in the keys of Inductor's caches; None: graphs are not cached."""
        if self.schedule.node_cost is not None:
            return None  # a function cannot be part of a key
        return get_hash_for_files(_SOURCES, self.fingerprint())

    def keep(
        self,
        forward: Problem,
        backward: Problem,
        gathered: Mapping[int, Transfer],
        costs: CostModel,
    ) -> Sequence[int]:
        """Which gathers of a backward graph to leave out; see ``graphshard.planning.keep_unsharded``."""
        if GraphKind.FORWARD in self.followed:
            kept = kept_inputs(self.followed[GraphKind.FORWARD], forward)
            return [i for i, transfer in gathered.items() if transfer.param in kept]
        return choose_kept(forward, backward, gathered, costs, self.schedule.limits().peak)

    @property
    def stows(self) -> bool:
        """Whether activations may leave the device to keep a budget."""
        limited = self.schedule.limits().peak is not None
        return limited and self.schedule.overlap and self.device.type != "cpu"

    def stow(
        self,
        forward: Problem,
        backward: Problem,
        saved: Sequence[SavedActivation],
        costs: CostModel,
    ) -> Sequence[int]:
        """Which activations are to; see ``graphshard.planning.activation_offload``."""
        return choose_offloaded(forward, backward, saved, self.schedule.limits(), costs)

    def decide(self, problem: Problem, costs: CostModel) -> tuple[Bucket, ...]:
        """The buckets of a graph."""
        collectives = without_host_copies(problem)
        if problem.graph in self.followed:
            buckets = follow(collectives, self.followed[problem.graph])
        else:
            buckets = self.schedule.plan_buckets(collectives, costs)
        prices = costs if self.schedule.overlap else None
        return add_host_copies(problem, buckets, prices, self.schedule.limits())

    def dump(self, plan: Plan, compiled: str) -> Dump:
        hardware = self.schedule.cost_model(self.device).hardware
        return Dump(plan, hardware, self.schedule.limits(), compiled)


class PlanRecord:
    """The plans of one Dynamo graph, as its passes ran; or as they ran when it was first compiled.

    A warm cache returns compiled graphs without running any pass, so the plans are kept beside
    Inductor's cache, under a key of the Dynamo graph.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        fqns: Sequence[str],
        compiling: CompileSettings,
        files: DumpWriter,
    ) -> None:
        traced = [gm.print_readable(print_output=False), compiling.fingerprint(), torch.__version__]
        # Not in the text, but AOTAutograd makes other graphs of it.
        traced += [str([getattr(value, "requires_grad", None) for value in inputs])]
        traced += [str(torch.is_grad_enabled())]
        self._key = get_hash_for_files(_SOURCES, "\n".join(traced)).hex()
        self._fqns = tuple(fqns)
        self._compiling, self._compiled = compiling, compile_id()
        self.files = files
        self._plans: dict[str, Plan] = {}

    def add(self, plan: Plan) -> None:
        self._plans[plan.graph] = plan
        self.files.plan(self._dump(plan))
        path = self._path(plan.graph)
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{id(self)}.tmp")
        scratch.write_text(plan.to_json())
        scratch.replace(path)

    def plans(self) -> list[Plan]:
        """Of forward, backward and inference graph, those that there are, parameters named."""
        return [plan.named(self._fqns) for plan in self._known()]

    def _known(self) -> list[Plan]:
        for kind in tuple(GraphKind):
            path = self._path(kind)
            if kind not in self._plans and path.exists():
                self._plans[kind] = Plan.from_json(path.read_text())
        return [self._plans[kind] for kind in tuple(GraphKind) if kind in self._plans]

    def dumps(self) -> list[Dump]:
        """As ``plans``, with what they were made for."""
        return [self._dump(plan) for plan in self._known()]

    def write_cached(self) -> None:
        """Write to ``files`` the plans of graphs that a cache has returned."""
        for dump in self.dumps():
            if not self.files.has(dump.plan.graph):
                self.files.plan(dump)

    def _dump(self, plan: Plan) -> Dump:
        return self._compiling.dump(plan.named(self._fqns), self._compiled)

    def _path(self, kind: str) -> Path:
        return Path(cache_dir()) / "graphshard" / f"{self._key}-{kind}.json"


class Partitioner(CustomPartitionerFn):
    """Runs the joint passes, then torch's min-cut partitioner, and checks what it saves."""

    def __init__(self, files: DumpWriter, compiling: CompileSettings) -> None:
        self._files = files
        self._compiling = compiling

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        self._files.code("joint", "before", gm.graph)
        for joint_pass in passes.JOINT:
            joint_pass(gm)
        gm.graph.lint()
        gm.recompile()
        self._files.code("joint", "after", gm.graph)
        derived = [node.name for node in passes.parameter_derived(gm.graph)]
        with saving_activations(self._compiling.schedule.activation_memory_budget):
            forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        passes.keep_parts(forward.graph, backward.graph, kwargs["num_fwd_outputs"])
        for part in (forward, backward):
            part.graph.lint()
            part.recompile()
        compiling, kept = self._compiling, []
        costs = compiling.schedule.cost_model(compiling.device)
        given = forward.graph, backward.graph, kwargs["num_fwd_outputs"], costs
        if compiling.schedule.overlap:
            with self._rewriting("keep", forward, backward):
                kept = passes.keep_gathered(*given, compiling.keep)
        if compiling.stows:
            with self._rewriting("stow", forward, backward):
                passes.stow_activations(*given, compiling.stow)
        verify_partition(forward, sorted({*derived} - {*kept}), kwargs["num_fwd_outputs"])
        return forward, backward

    @contextmanager
    def _rewriting(
        self, name: str, forward: fx.GraphModule, backward: fx.GraphModule
    ) -> Iterator[None]:
        """Around a pass that rewrites both graphs."""
        parts = {f"{name}-forward": forward, f"{name}-backward": backward}
        for of, part in parts.items():
            self._files.code(of, "before", part.graph)
        yield
        for of, part in parts.items():
            part.graph.lint()
            part.recompile()
            self._files.code(of, "after", part.graph)

    def uuid(self) -> bytes | None:
        return self._compiling.uuid()

    def __getstate__(self) -> dict[str, Any]:
        return {}  # what is pickled into a cache key is the uuid


class Lowering(CustomGraphPass):
    """Runs the graph pass on a forward, backward or inference graph, verifies and records it."""

    def __init__(self, record: PlanRecord, compiling: CompileSettings) -> None:
        self._record = record
        self._compiling = compiling

    def __call__(self, graph: fx.Graph) -> None:
        costs = self._compiling.schedule.cost_model(self._compiling.device)
        kind = _kind(graph)
        self._record.files.code(kind, "before", graph)
        plan = passes.lower(graph, kind, costs, self._compiling.decide)
        verify_lowered(graph, plan)
        self._record.files.code(kind, "after", graph)
        self._record.add(plan)
        donate_nothing()

    def uuid(self) -> bytes | None:
        return self._compiling.uuid()

    def __getstate__(self) -> dict[str, Any]:
        return {}  # what is pickled into a cache key is the uuid


def _kind(graph: fx.Graph) -> GraphKind:
    names = [node.target for node in graph.nodes if node.op == "placeholder"]
    if any(name.startswith("tangents_") for name in names):
        return GraphKind.BACKWARD
    return (
        GraphKind.FORWARD
        if any(name.startswith("primals_") for name in names)
        else GraphKind.INFERENCE
    )


def compile_graph(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    record: PlanRecord,
    compiling: CompileSettings,
    patches: dict[str, Any],
) -> Callable[..., Any]:
    """A callable that runs ``gm`` sharded; ``patches`` are Inductor options of the user's.

    Its backward is compiled now, too, so that all plans are known before anything is sent.
    """
    with eager_backward():
        return _compile(gm, inputs, record, compiling, patches)


def _compile(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    record: PlanRecord,
    compiling: CompileSettings,
    patches: dict[str, Any],
) -> Callable[..., Any]:
    lowering = Lowering(record, compiling)
    if compiling.compiler == "inductor":
        patches = {
            **KEEP_ORDER,
            **(KEEP_COPIED if compiling.offloads or compiling.stows else {}),
            **patches,
            "post_grad_custom_post_pass": lowering,
            "custom_partitioner_fn": Partitioner(record.files, compiling),
        }
        compiled: Any = compile_fx(gm, inputs, config_patches=patches)
        return compiled

    def run_by_op(graph_module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        lowering(graph_module.graph)
        graph_module.recompile()
        return make_boxed_func(graph_module)

    partition = Partitioner(record.files, compiling)
    return aot_autograd(fw_compiler=run_by_op, partition_fn=partition)(gm, inputs)
