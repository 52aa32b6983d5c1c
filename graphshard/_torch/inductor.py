"""AOTAutograd and Inductor: compilers, custom passes, caches and settings.

Relies on its imports, with the same names and arguments in torch 2.11 and 2.13 unless a comment
says otherwise. Re-exports:

    aot_autograd              makes a Dynamo backend from forward and backward compilers
    make_boxed_func           gives a graph's callable AOTAutograd's calling convention
    min_cut_rematerialization_partition     AOTAutograd's partitioner of the joint graph
    CustomPartitionerFn       partitioner with a cache key
    get_hash_for_files        computes a cache key from source files
    cache_dir                 returns the folder of Inductor's caches
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext
from torch._inductor import config as inductor_config
from torch._inductor import ir, lowering
from torch._inductor.compile_fx import (
    compile_fx,
    compile_fx_inner,
    fake_tensor_prop,
    view_to_reshape,
)
from torch._inductor.custom_graph_pass import (
    CustomGraphPass,
    CustomPartitionerFn,
    get_hash_for_files,
)
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes import post_grad
from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.virtualized import V
from torch._logging import trace_structured
from torch._ops import OpOverload

from .kernel_order import KeepWaits
from .tensors import fake_mode_of

__all__ = [
    "CustomPartitionerFn",
    "aot_autograd",
    "cache_dir",
    "get_hash_for_files",
    "make_boxed_func",
    "min_cut_rematerialization_partition",
]


# Inductor options (torch/_inductor/config.py) whose passes would move, merge, split or replace
# planned collectives, with the values that disable them. Torch 2.11 does not have all of them.
_ON_BY_DEFAULT = {
    "reorder_for_peak_memory": False,
    "reorder_for_locality": False,
    "triton.reorder_for_reducing_graph_partitions": False,
}
_OFF_BY_DEFAULT = {
    "combo_kernels": False,  # combo kernels are reordered after `KeepWaits`
    "reorder_for_compute_comm_overlap": False,
    "bucket_all_gathers_fx": "none",
    "bucket_reduce_scatters_fx": "none",
    "bucket_all_reduces_fx": "none",
    "dedup_reduce_scatters": False,
    "aten_distributed_optimizations.enable_overlap_scheduling": False,
    "aten_distributed_optimizations.enable_low_contention_collectives": False,
    "aten_distributed_optimizations.allow_comms_decompositions": False,
    "freezing": False,  # makes weights constants, also in Dynamo: see `without_freezing`
}
KEEP_ORDER: dict[str, Any] = {
    name: off
    for name, off in {**_ON_BY_DEFAULT, **_OFF_BY_DEFAULT}.items()
    if hasattr(inductor_config, name)
}

# Inductor options that this backend sets to its own passes.
_OUR_PASSES = ("custom_partitioner_fn", "_post_fusion_custom_pass")

# Inductor options for graphs that may offload activations to the host. With layout optimization,
# Inductor would store activations after convolutions channels-last and convert the host copies to
# another layout, on the host, before the copies have completed.
KEEP_HOST_COPIES = {"layout_optimization": False}


def _decompositions_for(inputs: Sequence[object]) -> dict[Any, Any] | None:
    """Return Inductor's decompositions for a graph with these inputs, or None for the default."""
    # By default, a complex add becomes views and a real add, which our passes do not recognize as
    # the sum of two gradients of one parameter. With complex inputs, adds are therefore kept.
    if not any(isinstance(value, torch.Tensor) and value.is_complex() for value in inputs):
        return None
    table = dict(select_decomp_table())
    table.pop(torch.ops.aten.add.Tensor, None)
    return table


def options_of_plans(
    device: torch.device, on_schedule: Callable[[str], object] | None = None
) -> dict[str, Any]:
    """Return Inductor options that keep the planned order and, on a GPU, free dead buffers at once.

    ``on_schedule`` is called with the name of each graph and subgraph before its code is generated.
    """
    # Inductor keeps a dead buffer for a later one of the same size unless its estimate of peak
    # memory grows, and the estimate ignores memory held by collectives. In a GPT's backward, the
    # buffer of the head's gradient was kept for the embedding's: the peak was 1491 MB instead of
    # 1358 MB. Without reuse, a GPU's allocator finds memory just as quickly; a CPU's does not.
    frees_at_once = {} if device.type == "cpu" else {"allow_buffer_reuse": False}
    return {**KEEP_ORDER, **frees_at_once, "_post_fusion_custom_pass": KeepWaits(on_schedule)}


def with_planned_order(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return a user's Inductor options without those that this backend sets itself.

    These are the options of `KEEP_ORDER` and `_OUR_PASSES`. Warn if the user has enabled an option
    of `KEEP_ORDER` in ``asked``, or globally if it is off by default.
    """
    set_globally = {
        name: getattr(inductor_config, name, off) for name, off in _OFF_BY_DEFAULT.items()
    }
    chosen = {**set_globally, **asked}
    undone = [
        f"{name}={chosen[name]!r}"
        for name, off in KEEP_ORDER.items()
        if chosen.get(name, off) != off
    ]
    if undone:
        _warn_of_undone(undone)
    return {name: v for name, v in asked.items() if name not in (*KEEP_ORDER, *_OUR_PASSES)}


def without_freezing() -> AbstractContextManager[object]:
    """Return a context for Dynamo's traces that turns off ``freezing``, and warn if it was on."""
    # With freezing and no gradients, Dynamo treats weights as constants and inlines no modules.
    if inductor_config.freezing:
        _warn_of_undone(["freezing=True"])
    return inductor_config.patch(freezing=False)


def _warn_of_undone(settings: Sequence[str]) -> None:
    warnings.warn(
        f"graphs that graphshard compiles run without {', '.join(settings)}, which would move "
        "collectives away from their planned places or make weights constants: remove these "
        "settings from the options of torch.compile and from torch._inductor.config.",
        stacklevel=3,
    )


def replaced_passes(asked: Mapping[str, Any]) -> list[str]:
    """Return the names of the options in which a user has set a pass that this backend replaces."""
    chosen = {**{name: getattr(inductor_config, name) for name in _OUR_PASSES}, **asked}
    return [name for name in _OUR_PASSES if chosen[name] is not None]


def without_cuda_graphs(options: Mapping[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """Return Inductor options with CUDA graphs off, and warn if they were on.

    The options are returned unchanged if the user has set a ``cudagraph_policy``.

    Args:
        asked: ``meta`` of the graph module, where Dynamo stores ``override_cudagraphs`` (torch
            2.13) of the user's code. The entry is removed if CUDA graphs are turned off.
    """
    # CUDA graphs cannot replay NCCL collectives, which hold buffers that the graphs consider free
    # (pytorch/torchtitan#2444, pytorch/pytorch#187565). The override's ``bwd`` can only turn CUDA
    # graphs off (``create_compiler_config_extra`` in torch/_inductor/compile_fx.py).
    override = getattr(asked.get("cudagraph_annotation"), "fwd", None)
    with inductor_config.patch(dict(options)):
        policy = getattr(inductor_config, "cudagraph_policy", None)
        is_on = inductor_config.triton.cudagraphs if override is None else override
        # A user who sets a ``cudagraph_policy`` (torch 2.13) captures whole graphs.
        if not is_on or policy is not None:
            return dict(options)
    asked.pop("cudagraph_annotation", None)
    warnings.warn(
        "graphs that graphshard compiles run without CUDA graphs: torch.compile's CUDA graphs "
        'cannot contain NCCL collectives. Remove mode="reduce-overhead", triton.cudagraphs and '
        'override_cudagraphs, and replace "max-autotune" with "max-autotune-no-cudagraphs". To '
        "capture graphs yourself, set torch._inductor.config.cudagraph_policy (torch 2.13).",
        stacklevel=2,
    )
    return {**options, "triton.cudagraphs": False}


# Inductor options for the user's passes, which change the graphs that our passes receive.
_OTHER_PASSES = (
    "pre_grad_custom_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
)


def lower_as_collective(op: OpOverload) -> None:
    """Make Inductor treat an operator as an asynchronous launch, which ``wait_tensor`` completes.

    Args:
        op: operator with a list of tensors as first argument, which returns a result for each.
    """

    # Inductor reuses or overwrites a buffer after the last operator that reads it. The inputs of a
    # collective stay intact until its wait (``get_volatile_reads`` in torch/_inductor/ir.py,
    # ``register_comm_lowerings`` in torch/_inductor/comm_lowering.py).
    def lower(tensors: list[Any], *args: Any) -> list[Any]:
        # Inductor passes ``wait_tensor`` the traced layout. For any other layout, it would insert a
        # copy before the wait, which would then wait for the copy.
        traced: Any = V.graph.current_node.args[0]
        ordered = list(map(_laid_out_as, tensors, traced))
        launched: Any = ir._CollectiveKernel.create_out_of_place(op, ordered, *args)
        return [ir.TensorBox.create(result) for result in launched]

    lowering.register_lowering(op, type_promotion_kind=None)(lower)


def _keep_all_reduced_rows_unpadded() -> None:
    """Make Inductor pass dense tensors to coalesced all-reduces, as NCCL requires."""
    # On GPUs, Inductor pads the rows of buffers whose strides are not fixed. It fixes the strides
    # of the inputs of all other collectives (torch/_inductor/comm_lowering.py).
    op = torch.ops._c10d_functional.all_reduce_coalesced.default
    in_place = torch.ops._c10d_functional.all_reduce_coalesced_.default

    def lower(tensors: list[Any], *args: Any) -> list[Any]:
        copies = [ir.ExternKernel.require_contiguous(lowering.clone(t)) for t in tensors]
        ir._CollectiveKernel.create_inplace(in_place, copies, *args)
        return copies

    def lower_in_place(tensors: list[Any], *args: Any) -> list[Any]:
        traced: Any = V.graph.current_node.args[0]
        strides = [node.meta["val"].stride() for node in traced]
        tensors = list(map(ir.ExternKernel.require_exact_strides, tensors, strides))
        ir._CollectiveKernel.create_inplace(in_place, tensors, *args)
        return tensors

    lowering.register_lowering(op, type_promotion_kind=None)(lower)
    lowering.register_lowering(in_place, type_promotion_kind=None)(lower_in_place)
    # By default, Inductor would first fix the order of the strides, and pad.
    for target in (op, in_place):
        lowering.add_layout_constraint(target, lambda node, *args, **kwargs: (args, kwargs))


_keep_all_reduced_rows_unpadded()


def lower_as_transposed_copy(op: OpOverload) -> None:
    """Make Inductor compute a contiguous transpose of a matrix in a kernel that is never fused."""

    def lower(x: Any) -> Any:
        x.realize()  # otherwise, the kernel would compute the values again
        copy: Any = lowering.clone(lowering.permute(x, [1, 0]))
        copy.realize()
        copy.freeze_layout()  # contiguous; Inductor would choose the layout of ``x``
        V.graph.no_fuse_buffer_names.add(copy.get_name())
        return copy

    lowering.register_lowering(op, type_promotion_kind=None)(lower)


def _laid_out_as(tensor: Any, traced: fx.Node) -> Any:
    """Return Inductor's ``tensor`` with its strides in the order of the traced strides."""
    # Like ``constrain_to_fx_strides`` in torch/_inductor/lowering.py, which skips lists in 2.11.
    order = ir.get_stride_order(traced.meta["val"].stride(), V.graph.sizevars.shape_env)
    return ir.ExternKernel.require_stride_order(tensor, order)


# Random operators that Inductor replaces with its own. A graph draws the seeds of all its random
# operators at once (torch/_inductor/fx_passes/replace_random.py).
SEEDED = (torch.ops.aten.rand, torch.ops.aten.randn, torch.ops.aten.randint)

# Reads one seed from the tensor of seeds that Inductor creates for a graph's random numbers.
lookup_seed = torch.ops.prims.inductor_lookup_seed.default


def call_subgraph(graph: fx.Graph, name: str, arguments: Sequence[fx.Node]) -> fx.Node:
    """Insert a call to a graph's submodule, which Inductor compiles once for all calls to it.

    See ``InvokeSubgraph`` in torch/_inductor/ir.py. No result may be a view, as
    ``graphshard.passes.region_boundaries`` explains.
    """
    owner: Any = graph.owning_module
    output = getattr(owner, name).graph.output_node()
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))  # keep their layouts
    target = graph.get_attr(name)
    return graph.call_function(torch.ops.higher_order.invoke_subgraph, (target, name, *arguments))


def force_realize(node: fx.Node) -> None:
    """Make Inductor materialize a node's value where it is computed, and never recompute it."""
    node.meta["inductor_realize_to_strides"] = True  # see ``run_node``, torch/_inductor/graph.py


def compile_rewritten(
    gm: fx.GraphModule,
    inputs: Sequence[object],
    rewrite: Callable[[fx.GraphModule], object],
    options: Mapping[str, Any],
) -> Any:
    """Compile a graph with Inductor after ``rewrite`` has changed each partitioned graph in place.

    ``rewrite`` gets each graph after Inductor's post-grad passes that replace operators, such as
    ``mm`` and ``add`` with ``addmm``. Inductor then runs all its post-grad passes on the rewritten
    graph, except those that fuse collectives.
    """

    def compile_part(part: fx.GraphModule, part_inputs: Sequence[Any], **arguments: Any) -> Any:
        _fuse_operators(part, part_inputs)
        rewrite(part)
        part.recompile()
        # Our collectives must not be fused with other operators.
        with inductor_config.patch(_micro_pipeline_tp=False, _fuse_ddp_communication=False):
            return compile_fx_inner(part, part_inputs, **arguments)

    return _compile(gm, inputs, compile_part, options)


def read_partitioned(
    gm: fx.GraphModule,
    inputs: Sequence[object],
    read: Callable[[fx.GraphModule], object] | None,
    options: Mapping[str, Any],
) -> Any:
    """Trace a graph, and call ``read`` with each graph that ``compile_rewritten`` would rewrite.

    If ``read`` is None, only partition the graph.

    The returned callable returns uninitialized tensors instead of the graph's results.
    """

    def read_part(part: fx.GraphModule, part_inputs: Sequence[Any], **_: Any) -> Any:
        if read is not None:
            _fuse_operators(part, part_inputs)
            read(part)
        return _uninitialized_results(part)

    return _compile(gm, inputs, read_part, {**options, "force_disable_caches": True})


def _fuse_operators(part: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Run Inductor's post-grad passes that replace operators, which affect times and memory."""
    # In the order of ``_InProcessFxCompile.codegen_and_compile`` in torch/_inductor/compile_fx.py
    # and ``post_grad_passes`` in torch/_inductor/fx_passes/post_grad.py. Inductor runs them again.
    if all(node.op in ("placeholder", "output") for node in part.graph.nodes):
        return
    view_to_reshape(part)
    placeholders = part.graph.find_nodes(op="placeholder")
    # On GPUs, Inductor may have padded the rows of saved activations.
    if any(map(_has_other_strides, placeholders, inputs)):
        with torch.no_grad():
            fake_tensor_prop(part, inputs)
    fake_mode = fake_mode_of(node.meta.get("val") for node in part.graph.nodes)
    with V.set_fake_mode(fake_mode):
        if inductor_config.pattern_matcher:
            post_grad.lazy_init()
            post_grad.remove_noop_ops(part.graph)
            for patterns in post_grad.pass_patterns:
                patterns.apply(part.graph)
        if inductor_config._micro_pipeline_tp:
            micro_pipeline_tp_pass(part.graph)


def _has_other_strides(placeholder: fx.Node, value: object) -> bool:
    traced = placeholder.meta.get("val")
    if not (isinstance(traced, torch.Tensor) and isinstance(value, torch.Tensor)):
        return False
    # As text, because comparing symbolic strides could add guards.
    return traced.layout is torch.strided and str(traced.stride()) != str(value.stride())


def _compile(
    gm: fx.GraphModule,
    inputs: Sequence[object],
    compile_part: Callable[..., Any],
    options: Mapping[str, Any],
) -> Any:
    return compile_fx(
        gm,
        inputs,  # type: ignore[arg-type]
        inner_compile=compile_part,
        config_patches=dict(options),
        decompositions=_decompositions_for(inputs),
    )


def _uninitialized_results(gm: fx.GraphModule) -> Any:
    placeholders = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    outputs = tuple(gm.graph.output_node().args[0])  # type: ignore[arg-type]

    def run(*values: Any) -> tuple[Any, ...]:
        return tuple(
            values[placeholders[node]] if node in placeholders else _like(node) for node in outputs
        )

    return make_boxed_func(run)


def _like(output: object) -> object:
    """Return a tensor with the shape and layout of a graph's output; other outputs unchanged."""
    value = output.meta["val"] if isinstance(output, fx.Node) else output
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def eager_backward() -> AbstractContextManager[None]:
    """Make AOTAutograd compile a backward graph together with its forward graph."""
    return functorch_config.patch(force_non_lazy_backward_lowering=True)


def saving_activations(budget: float | None) -> AbstractContextManager[None]:
    """Limit the fraction of activations that the partitioner saves, unless ``budget`` is None."""
    changes: dict[str, Any] = {}
    if budget is not None:
        # A budget of 0 would also recompute values that must be saved.
        changes["activation_memory_budget"] = max(budget, 1e-9)
    # Under a budget, the partitioner adds up the sizes of all graph inputs, including the meshes of
    # DTensors: script objects of unknown size. Torch 2.11 does not have this option.
    if hasattr(functorch_config, "unsafe_treat_script_objects_as_zero_size"):
        changes["unsafe_treat_script_objects_as_zero_size"] = True
    return functorch_config.patch(changes)


def take_region_budget(gm: fx.GraphModule) -> float | None:
    """Return the ``region_activation_memory_budget`` of a Dynamo graph, and remove it from nodes.

    Return None, and change nothing, if there is none or if it covers only a part of the graph;
    torch then raises its own error.
    """
    # See torch/autograd/graph.py; not in torch 2.11.
    key = getattr(torch.fx.traceback, "MEMORY_BUDGET_ANNOTATION_KEY", None)
    nodes = [
        n for part in gm.modules() if isinstance(part, fx.GraphModule) for n in part.graph.nodes
    ]
    calls = [node for node in nodes if node.op.startswith("call_")]
    budgets = {node.meta.get("custom", {}).get(key) for node in calls}
    if len(budgets) != 1 or budgets == {None}:
        return None
    for node in nodes:
        custom = node.meta.get("custom", {})  # copied, because nodes may share it
        node.meta["custom"] = {name: value for name, value in custom.items() if name != key}
    return float(budgets.pop())


def has_activation_budget() -> bool:
    return bool(functorch_config.activation_memory_budget < 1)


def uses_channels_last(graph: fx.Graph, kind: str) -> bool:
    """Return whether Inductor computes the convolutions of a graph in channels-last layout."""
    gm = graph.owning_module
    assert gm is not None
    return GraphLowering.decide_layout_opt(gm, is_inference=kind == "inference")


def donate_nothing() -> None:
    """Keep the backward graph being compiled from overwriting the activations saved for it."""
    # AOTAutograd donates them to backward unless the first backward retains its graph, which is not
    # known yet (``bw_donated_idxs`` in torch/_functorch/_aot_autograd/schemas.py).
    metadata = TracingContext.get().fw_metadata
    if metadata is not None:
        metadata.bw_donated_idxs = []


def trace_artifact(name: str, encoding: str, payload: Callable[[], str]) -> None:
    """Log an artifact, with encoding "json" or "string", to ``TORCH_TRACE``.

    tlparse shows it as a file.
    """
    # ``payload`` is called only if the log is enabled (torch/_logging/_internal.py).
    metadata = {"name": name, "encoding": encoding}
    trace_structured("artifact", metadata_fn=lambda: metadata, payload_fn=payload)


def caches_graphs() -> bool:
    """Return whether Inductor can reuse graphs that another process on this host has compiled."""
    # Ranks that autotune kernels together (torch/_inductor/config.py) must compile at the same
    # time, so none can wait for another rank's graphs.
    together = getattr(inductor_config, "distributed_max_autotune_gemm", False)
    disabled = inductor_config.force_disable_caches or together
    return bool(inductor_config.fx_graph_cache) and not disabled


def mode_options(mode: str | None) -> dict[str, Any]:
    return torch._inductor.list_mode_options(mode) if mode else {}


def settings_text(options: Mapping[str, Any]) -> str:
    """Return the settings of Inductor and AOTAutograd that torch's cache keys cover, as text.

    Equal settings give equal text in every process, unless a custom pass has no key.
    """
    # ``save_config_portable`` (torch/utils/_config_module.py) omits the settings that torch omits
    # from its cache keys.
    with inductor_config.patch(dict(options)):
        configs = [
            sorted(config.save_config_portable(ignore_private_configs=False).items())
            for config in (inductor_config, functorch_config)
        ]
        passes = [getattr(inductor_config, name) for name in _OTHER_PASSES]
    # Any text will do for passes without a key, because Inductor does not cache their graphs.
    keys = [p.uuid() if isinstance(p, CustomGraphPass) else repr(p) for p in passes]
    return f"{configs} {keys}"
