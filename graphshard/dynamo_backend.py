"""The Dynamo backend, which shards the model at the first compile and compiles its graphs.

    first call     a module is compiled   ─► shard it before Dynamo traces its first frame
                   a function is compiled ─► its graph has full parameters as inputs: shard the
                                             models that own them, and have Dynamo trace again
    every compile  the graph has shards as inputs ─► guard their sharded params
                                                  ─► pipeline.compile

A module is sharded before the trace, because Dynamo may run its whole forward eagerly (``nn.LSTM``,
a graph break in a loop), in which case no graph with a parameter reaches the backend.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from . import progress
from ._torch.aot_graphs import flat_inputs
from ._torch.as_parameter import (
    parameters_returned,
    trace_getters,
    trace_tables_by_attribute,
)
from ._torch.distributed import process_group
from ._torch.dynamo import (
    Trace,
    is_capturing,
    on_compile_end,
    on_compile_start,
    on_lookup,
    saves_compiled_frames,
    sources,
)
from ._torch.frames import (
    CompiledCall,
    CompileRequest,
    compile_request,
    compiled_call,
    is_in_compiled_autograd,
)
from ._torch.inductor import mode_options, take_region_budget, without_freezing
from ._torch.unused_work import without_unused_work
from .cpython_tuning import without_full_collections
from .errors import BackendError
from .options.float8_policy import Float8Policy
from .options.options import Options, hashable, mesh_for
from .options.schedule_policy import SchedulePolicy
from .params.compare_traces import ForwardCheck, names_of
from .params.eager import with_parameters_returned
from .params.first_forward import (
    forget_first_forward,
    has_yet_to_cast,
    is_plain,
    shard_before_first_forward,
    stop_watching,
    watch,
    watch_idle,
    watch_sharded,
)
from .params.graph_params import (
    check_reads,
    find_root,
    guard_shard,
    record_graph_breaks,
    sync_params,
    trace_parameters,
    with_backward_hook,
)
from .params.memory_report import future_state_bytes, with_gathered_bytes
from .params.mixed_precision import check_cast_boundaries
from .params.module_class import adopt
from .params.plain_params import noted_ignored
from .params.shard import shard_module
from .params.sharded_param import ShardedParam, sharded_param_of
from .params.trained_module import uncompiled_module
from .pipeline.compile import CompiledGraph, compile_traced
from .pipeline.meter import Interval, Meter, measured_metrics
from .pipeline.settings import CompileSettings
from .pipeline.traced_graph import Runnable, TracedGraph
from .planning.plan import Plan
from .ranks.plan_consensus import PlanConsensus
from .show.dump_folder import DumpWriter, delete_dumps
from .show.metrics import metrics
from .show.table import summary


class Backend:
    """A ``torch.compile`` backend for fully sharded training, created by :func:`backend`."""

    reports_progress: ClassVar[bool] = True

    def __init__(self, options: Options) -> None:
        self.options = options
        self._graphs: list[CompiledGraph] = []
        self._meters: list[Meter] = []  # one per graph
        self._interval = Interval()
        self._padding: dict[str, None] = {}  # padding advice of each compiled model
        self._compile_numbers = itertools.count()  # includes failed compiles, whose dumps are kept
        self._consensus = PlanConsensus()
        self._created_ns = time.time_ns()
        self.forward_check = ForwardCheck(options)
        on_compile_start(_shard_before_trace)
        _trace_reads()
        watch_idle(self)

    def __call__(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> Runnable:
        """Compile a Dynamo graph, or have Dynamo trace its frame again.

        If an input is a full parameter, its model is sharded and Dynamo traces again. Dynamo also
        traces again if a sharded parameter, or its ``requires_grad``, has changed. ``mode`` and
        ``options`` are the arguments of ``torch.compile``; only Inductor uses them.
        """
        trace, call = Trace(), compiled_call()
        if self._shard_plain_inputs(trace, gm, inputs, call):
            raise trace.retrace("graphshard sharded the model")
        if not sync_params(trace, gm, inputs):
            raise trace.retrace("a sharded parameter, or its requires_grad, changed")
        check_reads(gm, inputs)
        params = [sharded_param_of(value) for value in inputs]
        self.forward_check.check(gm, inputs)
        record_graph_breaks(trace, params, call)
        return self._compile(gm, inputs, params, {**mode_options(mode), **(options or {})})

    def _compile(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        params: Sequence[ShardedParam | None],
        inductor_options: Mapping[str, Any],
    ) -> Runnable:
        sharded = [param for param in params if param is not None]  # None: other inputs
        specs = [param.spec for param in sharded]
        by_input = [None if i is None else params[i] for i in flat_inputs(gm)]
        fqns = [param.fqn if param else "" for param in by_input]
        traced = TracedGraph(
            gm,
            inputs,
            fqns=fqns,
            shards=[value for value, param in zip(inputs, params) if param],
            groups=list(dict.fromkeys(spec.groups.all_ranks for spec in specs)),
            marker_groups=sorted({name for spec in specs for name in spec.group_names()}),
            tp_groups=sorted(set(filter(None, (spec.groups.tp_ranks for spec in specs)))),
            inductor_options=inductor_options,
            future_state_bytes=partial(future_state_bytes, {param.model for param in sharded}),
        )
        device = specs[0].groups.device if specs else traced.device_of_inputs()
        schedule = self.options.schedule
        if (budget := take_region_budget(gm)) is not None:
            schedule = dataclasses.replace(schedule, activation_memory_budget=budget)
        settings = CompileSettings(
            self.options.compiler,
            schedule,
            device=device,
            regathered=frozenset(
                i for i, param in enumerate(by_input) if param and param.spec.overrides_reshard
            ),
        )
        returned = parameters_returned(gm) if sharded else {}
        run, compiled = self._build(traced, settings)
        if (is_latest := compiled.is_latest) is not None:
            guard_shard(gm, inputs, is_latest, "the graph saves what ranks last agreed to save")
        meter = Meter(device, waits=any(plan.buckets for plan in compiled.plans))
        run = meter.metered(run)
        if sharded:
            run = with_backward_hook(run)
            run = with_gathered_bytes(run, params, compiled.max_gathered_bytes())
            run = with_parameters_returned(run, returned)
        self._graphs.append(compiled)  # without ``run``, to not keep the graph alive
        self._meters.append(meter)
        if sharded:
            stop_watching(self)
        for model in {param.model for param in sharded}:
            model.warn_of_other_options(self.options)
            self._padding[model.padding] = None
            model.compiled = True
        return run

    def _build(
        self, traced: TracedGraph, settings: CompileSettings
    ) -> tuple[Runnable, CompiledGraph]:
        # Overridden by forecasts: see forecast/trace.py.
        writer = self._next_dump_writer(traced.groups)
        return compile_traced(traced, settings, self._consensus, writer)

    def __deepcopy__(self, memo: object) -> Backend:
        return self  # Lightning copies arguments of torch.compile, but plans must not be copied

    @property
    def __name__(self) -> str:
        # torch.compile reads ``__name__`` when called with a module: see [Note: first forward] in
        # graphshard/params/first_forward.py.
        if (request := compile_request()) is not None:
            self.given_to_compile(request)
        return "graphshard"

    def given_to_compile(self, request: CompileRequest) -> None:
        policy = self.options.policy_of(self.options.policy_glob(""))
        shard_before_first_forward(self, request, policy)
        watch(self, request.given)

    def compiles(self, call: CompiledCall) -> bool:
        return _backend_of(call) is self

    def shard_compiled(self, root: nn.Module, call: CompiledCall) -> None:
        """Shard the unsharded parameters of ``root`` before Dynamo traces the compiled call."""
        will_cast = has_yet_to_cast(root, call)
        if not will_cast:
            forget_first_forward(root)
        if self.plain_parameters(root):
            check_cast_boundaries(root, self.options, call.runs(root), will_cast)
            self.shard_now(root, call.runs(root))

    def plain_parameters(self, root: nn.Module) -> list[nn.Parameter]:
        ignored = self.ignored(root)
        return [p for p in root.parameters() if is_plain(p) and p not in ignored]

    def ignored(self, root: nn.Module) -> Set[nn.Parameter]:
        """Return the parameters that this backend or an earlier sharding of ``root`` ignores."""
        return self.options.ignored_params | noted_ignored(root)

    def shard_now(self, root: nn.Module, in_use: bool = False) -> None:
        """Shard ``root`` in place, even while its forward runs (``in_use``)."""
        _refuse_precompile()
        mesh = mesh_for(self.options, self.plain_parameters(root))
        progress.report(f"sharding {type(root).__name__} over {mesh.size()} ranks")
        ignored = self.ignored(root)
        shard_module(root, mesh, self.options, ignored, in_use=in_use, allow_meta=False)
        watch_sharded(root)
        stop_watching(self)

    @property
    def plans(self) -> list[Plan]:
        """The plan of every graph compiled so far, in order of compilation."""
        return [plan for graph in self._graphs for plan in graph.plans]

    def predicted_exposure(self) -> float:
        """Return the predicted fraction of step time in which compute waits for communication.

        Every forward and backward graph compiled so far counts once; the result is 0 if there are
        none. The prediction is for ``schedule.hardware``.
        """
        dumps = [dump for graph in self._graphs for dump in graph.dumps]
        return metrics(dumps)["predicted_exposure"]

    def summary(self) -> str:
        """Return tables of every compiled graph: its collectives, predicted times and peak memory.

        The tables are followed by the candidates of ``SchedulePolicy(auto=True)``, the number of
        layers traced as one, and descriptions of padding that takes much memory, if any.
        """
        tables = summary([dump for graph in self._graphs for dump in graph.dumps])
        tried = dict.fromkeys(graph.tried for graph in self._graphs if graph.tried)
        shared = [
            f"graph {graph.compile_id}: AOTAutograd traced {graph.num_shared_layers} layers as one"
            for graph in self._graphs
            if graph.num_shared_layers
        ]
        return "\n\n\n".join([tables, *tried, *shared, *filter(None, self._padding)])

    def metrics(self, *, steps: int | None = None, tokens: int | None = None) -> dict[str, float]:
        """Return numbers to log, as a flat dictionary, without waiting for the device.

        ``compile_s`` is the wall time of all compiles so far, and ``num_compiles`` the number of
        Dynamo graphs compiled. Of these graphs, ``num_recompiles`` were compiled because guards
        failed, and ``num_cache_hits`` came from Inductor's cache. The other numbers count every
        forward and backward graph compiled so far once: times predicted for ``schedule.hardware``
        in microseconds, the largest planned live memory of a graph in bytes, and the bytes of each
        kind of collective and host copy.

        ``measured_us``, ``measured_exposed_us`` and their ratio ``measured_exposure`` cover the
        training graphs that have been timed: in their third run, and then in every 101st. They are
        missing until a graph has been timed. Exposed time is time that this rank's compute waits
        for collectives and host copies. ``max_allocated_bytes`` is the peak of CUDA's caching
        allocator, and is missing without CUDA.

        Args:
            steps: number of optimizer steps since the last call with ``steps``. The first such call
                only starts the clock; later ones add ``step_s``, without the time of compiles, and
                ``mfu``: the flops of matrix products, attention and convolutions, without
                recomputation, as a fraction of the peak of ``schedule.hardware`` in their dtypes.
            tokens: number of tokens in these steps; adds ``tokens_per_s`` when ``step_s`` is added.

        Raises:
            ValueError: ``steps`` is less than 1, or ``tokens`` is given without ``steps``.
        """
        graphs = self._graphs
        compile_s = sum(graph.seconds for graph in graphs)
        peak_us = sum(
            graph.peak_us(meter.num_forwards, meter.num_backwards)
            for graph, meter in zip(graphs, self._meters)
        )
        trained = [m for g, m in zip(graphs, self._meters) if g.trains()]
        return {
            "num_compiles": len(graphs),
            "num_recompiles": _num_recompiles([graph.compile_id for graph in graphs]),
            "num_cache_hits": sum(graph.has_loaded for graph in graphs),
            "compile_s": compile_s,
            **metrics([dump for graph in graphs for dump in graph.dumps]),
            **measured_metrics(trained),
            **self._interval.metrics(steps, tokens, compile_s, peak_us),
        }

    def __repr__(self) -> str:
        mesh = self.options.mesh
        shape = "all" if mesh is None else " x ".join(map(str, mesh.shape))
        return (
            f"<graphshard.Backend: {self.options.strategy()} over {shape} ranks, "
            f"{len(self.plans)} graphs compiled>"
        )

    def _next_dump_writer(self, groups: Sequence[str]) -> DumpWriter:
        # Among the ranks that have the graph, only the first one writes files.
        mesh, rank = self.options.mesh, dist.get_rank() if dist.is_initialized() else 0
        first_rank = 0 if mesh is None else int(mesh.mesh.min())
        if groups:
            first_rank = min(dist.get_process_group_ranks(process_group(groups[0])))
        folder = self.options.dump if rank == first_rank else None
        number = next(self._compile_numbers)
        if folder is not None and number == 0:
            delete_dumps(folder, self._created_ns)  # the page must not mix runs
        return DumpWriter(folder, number)

    def _shard_plain_inputs(
        self, trace: Trace, gm: fx.GraphModule, inputs: Sequence[Any], call: CompiledCall
    ) -> bool:
        """Shard the models whose full parameters are inputs; return whether there are any."""
        seen: dict[int, str] = {}
        for source, value in zip(sources(gm), inputs, strict=True):
            ignored = not is_plain(value) or value in self.options.ignored_params
            if ignored or id(value) in seen:
                continue
            root, in_use = find_root(trace, source, value, call)
            if value in noted_ignored(root):
                continue
            seen.update(names_of(root))
            check_cast_boundaries(root, self.options, in_use)
            self.shard_now(root, in_use)
        self.forward_check.expect(gm, inputs, seen)
        return bool(seen)


def _num_recompiles(compile_ids: Sequence[str]) -> int:
    # Dynamo names the graphs of a frame "3/0", "3/1" and so on, and counts from "0/0" after a
    # reset. The graphs of other backends are counted as well, so the first one may be "3/1".
    pairs = [compile_id.split("/") for compile_id in compile_ids]
    return sum(
        pair[1:] not in ([], ["0"]) and pair[0] in [earlier[0] for earlier in pairs[:i]]
        for i, pair in enumerate(pairs)
    )


def backend(
    mesh: DeviceMesh | None = None,
    *,
    reshard_after_forward: bool | int = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    fp8: Float8Policy | None = None,
    schedule: SchedulePolicy | None = None,
    compiler: str = "inductor",
    dump: str | Path | None = None,
    sync_module_states: bool = True,
) -> Backend:
    """Return a backend for ``torch.compile`` that shards the model it compiles, as FSDP2 does.

    At the first call, the parameters of the compiled module, or of the modules that a compiled
    function calls, are sharded in place, by default on dim 0 (ZeRO-3, Rajbhandari et al., arXiv
    1910.02054), and become ``DTensor``s; gradients are averaged over the mesh. Parameters that
    :func:`shard` has already sharded keep the arguments of that call, except ``schedule``,
    ``compiler`` and ``dump``.

    Args:
        mesh: ``DeviceMesh`` to shard over. A 1D mesh shards over all of its ranks, a 2D mesh
            (replicate, shard) over its second axis (HSDP). Defaults to a 1D mesh over the default
            process group.
        reshard_after_forward: True frees full parameters after forward and gathers them again in
            backward (ZeRO-3), except those whose second gather could not be hidden and that fit
            into ``schedule.memory_budget_gb`` or, without one, below each graph's smallest possible
            peak. False keeps all (ZeRO-2). An int k that divides the number of shards keeps a k-th
            of each full parameter on each rank, and backward gathers from only k neighboring ranks
            (hpZ of ZeRO++, Wang et al., arXiv 2306.10209).
        mp_policy: FSDP2's policy with the dtypes of gathered parameters, of gradient reductions,
            and of inputs and outputs of the compiled module. Sharded parameters and their gradients
            keep their dtype.
        offload_policy: FSDP2's policy. ``CPUOffloadPolicy()`` keeps shards and gradients, and
            therefore the optimizer state, in host memory, which is pinned by default. Replicated
            parameters stay on the device.
        ignored_params: parameters that are not sharded and whose gradients are not reduced.
        overrides: ``{fqn glob: {argument: value}}``, which sets ``mp_policy``, ``offload_policy``,
            ``fp8``, ``reshard_after_forward``, ``shard``, ``dim`` or ``mesh`` for the matching
            parameters. If several globs match, the last one wins. A glob that matches a module
            applies to all parameters in it, and its ``mp_policy`` casts inputs and outputs of the
            outermost modules that it matches. ``"shard": False`` replicates a parameter and
            all-reduces its gradient, as DDP does, without fp8. ``"dim": 1`` shards dim 1 instead of
            dim 0, as ``Shard(1)`` from FSDP2's ``shard_placement_fn`` does. ``"mesh"`` is another
            mesh to shard and reduce over, such as the ranks that hold the same experts; both meshes
            must be slices of one mesh. Gradients are still divided by the number of ranks of the
            argument ``mesh``.
        fp8: policy for fp8 matmuls and fp8 weight gathers of linears. Defaults to no fp8.
        schedule: limits and options of the schedule. Defaults to ``SchedulePolicy()``.
        compiler: "inductor", or "aot_eager", which runs the same graphs op by op in ATen.
        dump: folder in which the mesh's first rank writes the plan, trace, table and FX code of
            every compiled graph, and a page that shows them all, ``index.html``; created if
            missing. Each backend needs its own folder, because it deletes older dumps in the folder
            at its first compile.
        sync_module_states: whether to broadcast the first rank's buffers, and its parameters except
            ``ignored_params``, before sharding.

    Raises:
        ValueError: an argument is invalid. At the first call, on every rank and before the model is
            changed: there is no process group, a parameter cannot be sharded, or the models or
            arguments of ranks differ.
    """
    return Backend(Options.from_arguments(locals()))


def shard(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    reshard_after_forward: bool | int = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    fp8: Float8Policy | None = None,
    schedule: SchedulePolicy | None = None,
    compiler: str = "inductor",
    dump: str | Path | None = None,
    sync_module_states: bool = True,
) -> nn.Module:
    """Shard ``model`` in place now, before its first step, and return it.

    Takes the arguments of :func:`backend`, but ``schedule``, ``compiler`` and ``dump`` only have an
    effect when passed to :func:`backend`. A model on the meta device stays there, and nothing is
    broadcast: call ``model.to_empty(device=...)``, which allocates only shards, and initialize it.

    Raises:
        ValueError: ``model`` is not a module; otherwise as :func:`backend`, before the model is
            changed.
    """
    arguments = dict(locals())
    arguments.pop("model")
    _trace_reads()
    root = uncompiled_module(model)
    options = Options.from_arguments(arguments)
    mesh, ignored = mesh_for(options, root.parameters()), options.ignored_params
    shard_module(root, mesh, options, ignored, in_use=False, allow_meta=True)
    watch_sharded(root)
    return model


def from_string(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Runnable:
    """Compile a graph for ``torch.compile(model, backend="graphshard", options={...})``.

    ``options`` are the arguments of :func:`backend`; equal options share one backend.
    """
    on_compile_start(_shard_before_trace)
    return _backend_for(options or {})(gm, inputs, mode=mode)


def _shard_before_trace(_: object) -> None:
    # If a compiled function calls a module that Dynamo runs eagerly, that module is the root. It is
    # sharded now, because the parts of its call that Dynamo compiles may have no parameter.
    on_compile_end(_end_compile)
    if is_capturing():
        return
    call = compiled_call()
    if is_in_compiled_autograd() and _backend_of(call) is not None:
        raise BackendError(
            "graphshard does not support compiled autograd: set "
            "torch._dynamo.config.compiled_autograd=False, or call backward() outside of the "
            "compiled function"
        )
    if _backend_of(call) is not None:
        _refuse_precompile()
    if _is_backend(call.backend):
        _compiling.enter_context(without_full_collections())
        _compiling.enter_context(without_unused_work())
        _compiling.enter_context(without_freezing())
    root = call.root()
    if root is not None and (its_backend := _backend_of(call)) is not None:
        its_backend.shard_compiled(root, call)
        if its_backend.reports_progress:
            progress.report("tracing")


def _refuse_precompile() -> None:
    if saves_compiled_frames():
        raise BackendError(
            "graphshard does not support caching_precompile, which pickles guards on modules: "
            "unset TORCH_CACHING_PRECOMPILE, or set torch._dynamo.config.caching_precompile=False. "
            "Later runs load graphs from Inductor's caches without it"
        )


def _end_compile(_: object) -> None:
    _compiling.close()
    progress.end()


# Contexts in which Dynamo compiles a frame for a backend.
_compiling = contextlib.ExitStack()


def _backend_of(call: CompiledCall) -> Backend | None:
    if call.backend is from_string:
        return _backend_for(call.options)
    return call.backend if isinstance(call.backend, Backend) else None


def _given_by_name() -> None:
    if (request := compile_request()) is not None:
        _backend_for(request.options).given_to_compile(request)


def _trace_reads() -> None:
    trace_parameters()
    trace_getters(_is_ours)
    trace_tables_by_attribute(lambda p: sharded_param_of(p) is not None and _is_ours(), adopt)


def _is_ours() -> bool:
    # A function compiled with another backend may call one compiled with ours, and vice versa.
    return _is_backend(Trace().backend()) or _is_backend(compiled_call().backend)


def _is_backend(value: object) -> bool:
    return value is from_string or isinstance(value, Backend)


on_compile_start(_shard_before_trace)
on_lookup("graphshard", _given_by_name)  # torch.compile(..., backend="graphshard")

# Backends that were requested by name, keyed by their options.
_named: dict[Hashable, Backend] = {}


def _backend_for(options: Mapping[str, Any]) -> Backend:
    known = inspect.signature(backend).parameters
    if unknown := [name for name in options if name not in known]:
        raise BackendError(
            f"options has {unknown[0]!r}, which is not an argument of graphshard.backend: choose "
            f"from {list(known)}"
        )
    key = frozenset((name, hashable(value)) for name, value in options.items())
    if key not in _named:
        _named[key] = backend(**options)
    return _named[key]
