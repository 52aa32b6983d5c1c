"""Changes that graphshard makes to torch for the whole process.

`PATCHES` lists attributes of torch that `patch` replaces; `ENTRIES` lists registries of torch to
which we add entries. ``tests/graph/test_patches.py`` compares both with torch after a training
step. Temporary or conditional changes are not listed, for example:

- ``distributed.replace_wait`` replaces ``wait_tensor`` while the waits of a graph are timed.
- ``mock.patch.object`` replaces a class or function while a graph is compiled (``cpp_kernels.py``)
  or a process group is created (``distributed.py``).
- ``no_gpu/stand_ins.py`` simulates a GPU in the process that ``graphshard.check`` starts.
- With expert parallelism in torchtitan, ``dynamo.capture_scalar_outputs`` sets Dynamo's option.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

# Reason for replacing each attribute, keyed by its path.
PATCHES = {
    "torch.optim.optimizer.Optimizer.load_state_dict": (
        "Checks loaded state against the shards. Torch has only per-instance hooks for this."
    ),
    "torch.amp.grad_scaler.GradScaler._unscale_grads_": (
        "Lets all ranks skip the same steps. Torch compares only the ranks that have different "
        "shards of the first gradient, and has no hooks for this."
    ),
    **dict.fromkeys(
        (
            "torch.distributed.distributed_c10d.ProcessGroup.send",
            "torch.distributed.distributed_c10d.ProcessGroup.recv",
            "torch.distributed.distributed_c10d.ProcessGroup.recv_anysource",
            "torch.distributed.distributed_c10d.ProcessGroup.monitored_barrier",
        ),
        "Counts operations between two ranks, which gloo counts like collectives of all ranks.",
    ),
    "torch.distributed.tensor.DTensor.data": (
        "Makes `param.data = value` set the local tensor; torch's own setter loses the value."
    ),
    "torch.distributed.tensor.DTensor.__deepcopy__": (
        "Copies gradients that are slices of a reduction buffer; torch's own method fails."
    ),
    "torch.autograd.graph._engine_run_backward": (
        "Differentiates with respect to shards if autograd.grad or backward(inputs=) gets DTensors."
    ),
    "torch.autograd._engine_run_backward": "The same function, as autograd.grad calls it.",
    "torch._dynamo.backends.registry._COMPILER_FNS": (
        'Detects calls of torch.compile(model, backend="graphshard"), which do not call the '
        "backend before the first compile."
    ),
    "torch._dynamo.side_effects.SideEffects.store_attr": (
        "Assigns attributes of a traced parameter, such as its gradient, to its DTensor."
    ),
    "torch._dynamo.variables.higher_order_ops._check_all_tensorvariable": (
        "Lets scan, associative_scan and map take parameters; torch accepts no subclass of its "
        "variable class for tensors."
    ),
    "torch._dynamo.variables.invoke_subgraph.classify_vt": (
        "Traces each call of a nested_compile_region that takes a parameter. Unpatched, calls use "
        "the first call's parameter, because it has no source. Torch 2.11 does not have it."
    ),
    "torch._functorch._aot_autograd.graph_compile.run_joint_graph_passes_on_hops": (
        "Leaves shared layers, which AOTAutograd traces only once, unpartitioned: `inline_layers` "
        "inlines them."
    ),
    "torch._higher_order_ops.invoke_subgraph.InvokeSubgraphHOP.gen_schema": (
        "Derives the schema of a shared layer once. Unpatched, each call traces the layer twice."
    ),
    "torch._guards.InvokeSubgraphCache.add_effects": (
        "Raises if a shared layer has side effects, such as the check of torch.linalg.inv for "
        "errors. Unpatched, torch detaches the results of all calls but the first."
    ),
}

# Reason for adding entries to each table, keyed by its path.
ENTRIES = {
    "torch.optim.optimizer._global_optimizer_pre_hooks": (
        "Raises if an optimizer steps parameters that should be sharded but are not; warns if a "
        "backend was never used."
    ),
    "torch.optim.optimizer._global_optimizer_post_hooks": (
        "Increments the versions of stepped DTensors, so that backward detects changed parameters."
    ),
    "torch._dynamo.callback.callback_handler.start_callbacks": (
        "Shards a module before Dynamo traces it."
    ),
    "torch._dynamo.callback.callback_handler.end_callbacks": "Clears the progress line.",
    "torch._dynamo.variables.torch.TorchInGraphFunctionVariable._get_handlers": (
        "Traces the results of unshard markers as parameters."
    ),
    "torch._dynamo.variables.builder.VariableBuilder._type_dispatch_impl": (
        "Traces a DTensor in a module's _parameters as its full parameter, and traces reads of "
        "parameters without a new frame for each."
    ),
    "torch._dynamo.variables.base.VariableTrackerMeta.all_subclasses": (
        "Lists our variable class for traced parameters: Dynamo registers every subclass."
    ),
    "torch._inductor.lowering.lowerings": (
        "Makes host copies asynchronous, transposed copies unfused, and the inputs of coalesced "
        "all-reduces dense."
    ),
    "torch._inductor.lowering._maybe_layout_constraints": (
        "Keeps the rows of the inputs of coalesced all-reduces unpadded."
    ),
}


def patch(path: str, wrap: Callable[[Any], Any]) -> None:
    """Replace the attribute of torch at ``path``, one of `PATCHES`, with ``wrap(attribute)``."""
    assert path in PATCHES, f"{path}: add it to PATCHES, with the reason"
    owner_path, _, name = path.rpartition(".")
    owner = pkgutil.resolve_name(owner_path)
    setattr(owner, name, wrap(getattr(owner, name)))
