"""Trace the graphs of a training step with fake tensors and fake ranks.

    workload ─► model of fake tensors ─► shards of rank 0 in a fake group ─► AOTAutograd, partition
             ─► each graph as a ``Problem``, priced for the machine and for faster ones

Tensors are on the CPU; only the prices are those of the machine, because a simulated GPU
(``graphshard.check``) would need its own process. Dynamo's caches are reset.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from typing_extensions import override

from .._torch.aot_graphs import flat_inputs, original_inputs
from .._torch.dynamo import is_buffer, mark_dynamic, sources
from .._torch.tensors import new_fake_mode, size_expr, size_hint, tree_leaves, tree_map
from ..cost.hardware import Hardware, Rate
from ..cost.model import CostModel
from ..dynamo_backend import Backend, backend, shard
from ..failures import data_dependence
from ..fake_mesh import Ranks, fake_mesh, sharding_options
from ..kinds import GraphKind
from ..ops.nodes import WHOLE_SHARD
from ..params.memory_report import memory_report
from ..params.sharded_param import sharded_model_of
from ..passes.build_problem import saved_bytes, shard_bytes
from ..pipeline.compile import CompiledGraph, trace_only
from ..pipeline.run_passes import read_problems
from ..pipeline.settings import CompileSettings
from ..pipeline.traced_graph import Runnable, TracedGraph
from ..planning.plan import PlanParam, Problem
from ..scripts import Inputs, call_model, loss_of
from ..tensor_parallel import Parallelize

# Returns a model, which is copied, and the inputs of one microbatch on one rank. Called with meta
# as the default device.
MakeModel = Callable[[], tuple[nn.Module, Inputs]]

# Machines for which kernels are priced: the machine itself, and variants with one faster part.
BASELINE, FASTER_COMPUTE, FASTER_MEMORY, NO_LAUNCHES = "baseline", "compute", "memory", "launches"


@dataclass(frozen=True)
class StepGraph:
    """One graph of a training step."""

    params: tuple[PlanParam, ...]  # indexed by ``Transfer.param``
    problem: Problem  # with compute times of the ``BASELINE`` machine
    compute_us: Mapping[str, tuple[float, ...]]  # of ``problem``'s steps, by machine
    input_bytes: int  # shards and replicated parameters among the graph's inputs

    @property
    def kind(self) -> GraphKind:
        return self.problem.graph


@dataclass(frozen=True)
class HeldMemory:
    """Memory that a rank holds between graphs, and size of the full model; in bytes.

    Attributes:
        parameters: size of the parameter shards, including padding, and replicated parameters.
        trained: size of those ``parameters`` that have gradients.
        buffers: size of the model's buffers.
        num_params: number of parameter elements in the full model.
        params_bytes: size of the full model's parameters.
    """

    parameters: float
    trained: float
    buffers: float
    num_params: float
    params_bytes: float


@dataclass(frozen=True)
class TracedStep:
    """The graphs of a training step, and the memory that a rank holds between them."""

    graphs: tuple[StepGraph, ...]  # in compilation order
    held: HeldMemory
    saved: sympy.Expr = sympy.S.Zero  # bytes saved for backward, in the ``symbols`` of ``trace``
    notes: tuple[str, ...] = ()  # remarks on how the step was traced


def trace(
    make: MakeModel,
    ranks: Ranks,
    hardware: Hardware,
    options: Mapping[str, Any],
    prepare: Callable[[nn.Module], None] = lambda model: None,
    parallelize: Parallelize | None = None,
    symbols: Mapping[int, sympy.Symbol] | None = None,
) -> TracedStep:
    """Trace a training step on rank 0.

    Args:
        hardware: machine to price kernels for.
        options: arguments of ``graphshard.backend``.
        prepare: function called with a copy of the model, before the copy is split or sharded.
        parallelize: function that splits the copy over the mesh axis "tp" or "ep", if the axis has
            several ranks.
        symbols: symbols that replace sizes of the inputs, keyed by size; each size is at least 2.

    Raises:
        ValueError: the model has no loss or no trainable parameter; shapes or control flow depend
            on values of tensors; there is no backward graph; code outside of graphs reads a
            parameter or runs a graph several times; or, if ``ranks`` splits the model,
            ``parallelize`` is None or splits no parameter.
        RuntimeError: this process already has a process group.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "a forecast needs a process group of simulated ranks, but this process already has a "
            "process group: call plan before init_process_group, or in another process"
        )
    symbols = symbols or {}
    reader = _GraphReader(hardware, symbols)
    fake = new_fake_mode()
    with fake_mesh(ranks, "cpu") as mesh, warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")
        torch.compiler.reset()
        stack.callback(torch.compiler.reset)
        with torch.device("meta"):
            real = make()
        with fake:
            model, inputs = _without_values(*real)
            prepare(model)
            if axis := ranks.split_axis:
                _split(model, axis, mesh[axis], parallelize)
        options = sharding_options(options, model, mesh, ranks)
        # Outside of the fake mode: ranks exchange parameter names in real tensors.
        shard(model, **options)
        with fake:
            tracing = _TracingBackend(options, reader, on_gpu=hardware.device_type != "cpu")
            _mark_dynamic(inputs, symbols)
            dynamic = None if symbols else False
            _run(model, torch.compile(model, backend=tracing, dynamic=dynamic), inputs)
            held = _held(model)
    breaks = _breaks(model)
    _check_graphs(reader.graphs, tracing.most_runs(), breaks)
    notes = [f"{text}; eager parts are not counted" for text in breaks]
    if tracing.has_attention_dropout:
        notes.append(_DROPOUT_ON_GPU if tracing.on_gpu else _DROPOUT_ON_CPU)
    return TracedStep(tuple(reader.graphs), held, reader.saved, tuple(notes))


_DROPOUT_ON_GPU = "dropout of attention is free, since the flash kernel computes it"
_DROPOUT_ON_CPU = "attention with dropout holds all scores: on a CPU, it is not a flash kernel"


def _mark_dynamic(inputs: Inputs, sizes: Container[int]) -> None:
    for tensor in tree_leaves(dict(inputs) if isinstance(inputs, Mapping) else inputs):
        if isinstance(tensor, torch.Tensor):
            for dim in (dim for dim, size in enumerate(tensor.shape) if size in sizes):
                mark_dynamic(tensor, dim)


def _without_values(model: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
    memo: dict[int, torch.Tensor] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        empty = _empty_like(tensor)
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = empty
    return copy.deepcopy(model, memo), tree_map(_empty_like, inputs)


def _empty_like(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    # On the CPU, attention is a single operator, as on a GPU.
    empty = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
    return empty.requires_grad_(value.requires_grad)


def _split(model: nn.Module, axis: str, mesh: DeviceMesh, parallelize: Parallelize | None) -> None:
    if parallelize is None:
        raise ValueError(
            f"{axis}={mesh.size()}: pass a function that calls parallelize_module on the model: "
            "parallelize=.., or --tp-plan FILE.py:FUNCTION"
        )
    parallelize(model, mesh)
    if not any(isinstance(param, DTensor) for param in model.parameters()):
        raise ValueError(
            f"{axis}={mesh.size()}: parallelize did not split any parameter; it must turn some "
            "into DTensors on the mesh, as parallelize_module does"
        )


def _run(model: nn.Module, compiled: Callable[..., object], inputs: Inputs) -> None:
    try:
        loss_of(call_model(compiled, inputs)).backward()
    except Exception as error:
        if (reason := data_dependence(error)) is not None:
            raise ValueError(
                f"{reason}: a forecast has no values. Keep the computation in tensors, or make all "
                "shapes depend only on input shapes"
            ) from error
        sharded = sharded_model_of(model)
        if sharded is not None and sharded.reads_eagerly:
            # Gathered parameters have a class of their own, which fake tensors do not survive.
            raise ValueError(
                "code outside of graphs reads a parameter, which a forecast cannot trace "
                f"({'; '.join(_breaks(model))}): {_ONE_GRAPH}. The step failed with "
                f"{type(error).__name__}: {(str(error).strip() or '?').splitlines()[0]}"
            ) from error
        raise


_ONE_GRAPH = (
    "change the model so that Dynamo compiles it to one graph; TORCH_LOGS=graph_breaks shows what "
    "prevents that"
)


def _breaks(model: nn.Module) -> list[str]:
    """Describe the graph breaks of a step or, if their places are unknown, its eager modules."""
    sharded = sharded_model_of(model)
    assert sharded is not None
    classes = ", ".join(sharded.eager_classes) or (sharded.name if sharded.reads_eagerly else "")
    eager = [f"forward of {classes} runs outside of a graph"] if classes else []
    return [f"graph break at {where}" for where in sharded.breaks] or eager


def _check_graphs(graphs: Sequence[StepGraph], most_runs: int, breaks: Sequence[str]) -> None:
    if not any(graph.kind == GraphKind.BACKWARD for graph in graphs):
        raise ValueError(
            "no backward graph was compiled: the model needs trainable parameters, and a forward "
            "that Dynamo compiles, without torch.compiler.disable"
        )
    if most_runs > 1:
        raise ValueError(
            f"a graph runs {most_runs} times in a step, but a forecast would count it once "
            f"({'; '.join(breaks) or 'forward calls it repeatedly'}): {_ONE_GRAPH}"
        )


def _held(model: nn.Module) -> HeldMemory:
    report = memory_report(model)
    return HeldMemory(
        parameters=report.parameters.rank,
        trained=report.gradients.rank,
        buffers=report.buffers.rank,
        num_params=sum(p.numel() for p in model.parameters()),
        params_bytes=report.parameters.unsharded,
    )


class _TracingBackend(Backend):
    """A backend that passes graphs to a reader instead of compiling them."""

    reports_progress = False  # forecasts report their own progress

    def __init__(self, options: Mapping[str, Any], reader: _GraphReader, on_gpu: bool) -> None:
        super().__init__(backend(**options).options)
        self._reader = reader
        self.on_gpu = on_gpu
        self.has_attention_dropout = False

    @override
    def __call__(self, gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Runnable:
        for graph, node in _attention_with_dropout(gm):
            self.has_attention_dropout = True
            # Flash kernels of GPUs support dropout, but graphs are traced on the CPU.
            if self.on_gpu:
                _remove_dropout(node)
                graph.recompile()
        return super().__call__(gm, *args, **kwargs)

    def most_runs(self) -> int:
        return max((meter.num_runs for meter in self._meters), default=0)

    @override
    def _build(
        self, traced: TracedGraph, settings: CompileSettings
    ) -> tuple[Runnable, CompiledGraph]:
        settings = dataclasses.replace(settings, compiler="inductor")
        reader = self._reader
        run = trace_only(traced, settings, lambda graph, kind: reader.read(graph, kind, traced))
        return run, CompiledGraph((), settings, "")


_DROPOUT_ARG = 4  # position of ``dropout_p`` in the arguments of attention


def _attention_with_dropout(gm: fx.GraphModule) -> list[tuple[fx.GraphModule, fx.Node]]:
    # Bodies of checkpointed layers are graphs of their own.
    return [
        (part, node)
        for part in gm.modules()
        if isinstance(part, fx.GraphModule)
        for node in part.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
        if any(node.args[_DROPOUT_ARG : _DROPOUT_ARG + 1]) or node.kwargs.get("dropout_p")
    ]


def _remove_dropout(node: fx.Node) -> None:
    if len(node.args) > _DROPOUT_ARG:
        node.update_arg(_DROPOUT_ARG, 0.0)
    else:
        node.update_kwarg("dropout_p", 0.0)


class _GraphReader:
    """A reader that collects the graphs of a step, priced for each of ``faster_machines``."""

    def __init__(self, hardware: Hardware, symbols: Mapping[int, sympy.Symbol]) -> None:
        self._machines = faster_machines(hardware)
        self._symbols = symbols
        self._named: dict[sympy.Symbol, sympy.Symbol] = {}
        self.graphs: list[StepGraph] = []
        self.saved: sympy.Expr = sympy.S.Zero

    def read(self, graph: fx.Graph, kind: GraphKind, traced: TracedGraph) -> None:
        _mark_buffers(graph, traced)
        models = [CostModel(h, device_type=h.device_type) for h in self._machines.values()]
        params, problems = read_problems(graph, kind, models)
        self.graphs.append(
            StepGraph(
                params=tuple(dataclasses.replace(p, fqn=traced.fqns[p.input]) for p in params),
                problem=problems[0],
                compute_us={n: p.compute_us for n, p in zip(self._machines, problems)},
                input_bytes=shard_bytes(graph),
            )
        )
        self._named.update(self._names_in(graph))
        if kind == GraphKind.BACKWARD:
            saved = size_expr(saved_bytes(graph)).subs(self._named)
            # The other symbols are sizes of RNG states for recomputation, 16 bytes on a GPU.
            others = saved.free_symbols - {*self._symbols.values()}
            self.saved += saved.subs(dict.fromkeys(others, 0))

    def _names_in(self, graph: fx.Graph) -> Iterator[tuple[sympy.Symbol, sympy.Symbol]]:
        # Match Dynamo's symbols to ours by their sizes in this trace.
        for node in graph.find_nodes(op="placeholder"):
            value = node.meta.get("val")
            sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
            for size in (size for size in sizes if isinstance(size, torch.SymInt)):
                symbol, name = size_expr(size), self._symbols.get(size_hint(size))
                if symbol.is_Symbol and name is not None:
                    yield symbol, name


def _mark_buffers(graph: fx.Graph, traced: TracedGraph) -> None:
    """Mark the model's buffers as held outside of graphs, where ``HeldMemory`` counts them."""
    positions = flat_inputs(traced.gm)
    of_input = sources(traced.gm)
    for node, number in original_inputs(graph).items():
        position = positions[number]
        if position is not None and is_buffer(of_input[position]):
            node.meta[WHOLE_SHARD] = True


def faster_machines(hardware: Hardware) -> dict[str, Hardware]:
    """Return the machine itself and variants with one faster part each, keyed by name."""
    flops = {dtype: scaled(rate, 2.0) for dtype, rate in hardware.flops.items()}
    return {
        BASELINE: hardware,
        FASTER_COMPUTE: dataclasses.replace(hardware, flops=flops),
        FASTER_MEMORY: dataclasses.replace(
            hardware, memory=scaled(hardware.memory, 2.0), special_per_s=2 * hardware.special_per_s
        ),
        NO_LAUNCHES: dataclasses.replace(hardware, launch_us=0.0),
    }


def scaled(rate: Rate, factor: float) -> Rate:
    """Return ``rate`` with its peak multiplied by ``factor``."""
    return dataclasses.replace(rate, peak=factor * rate.peak)
