"""The table of everything that graphshard changes in torch for a whole process.

`PATCHES` are attributes of torch that `patch` replaces, `ENTRIES` are tables of torch that we add
entries to. ``tests/graph/test_patches.py`` compares both with torch after a training step. Two
other kinds of changes are temporary or stay in a separate process:

- During a compile, or while a checkpoint is loaded, ``mock.patch.object`` replaces a function
  (``cpp_kernels.py``, ``integrations/pretrained.py``).
- ``no_gpu/stand_ins.py`` simulates a GPU in the process that ``graphshard.check`` starts.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

# Reason for replacing each attribute, keyed by its path.
PATCHES = {
    "torch.optim.optimizer.Optimizer._patch_step_function": (
        "Notes every optimizer, for `live_instances`. Both __init__ and __setstate__ call it."
    ),
    "torch.optim.optimizer.Optimizer.load_state_dict": (
        "Checks loaded state against the shards. Torch only has hooks for single optimizers."
    ),
    "torch.distributed.tensor.DTensor.data": (
        "Assigns `param.data = value` to the local tensor, where torch's own loses the value."
    ),
    "torch.autograd.graph._engine_run_backward": (
        "Differentiates by the shards where autograd.grad or backward(inputs=) names DTensors."
    ),
    "torch.autograd._engine_run_backward": "The same function, as autograd.grad calls it.",
    "torch._dynamo.backends.registry._COMPILER_FNS": (
        'Tells when torch.compile(model, backend="graphshard") is called, which passes the backend '
        "nothing before the first compile."
    ),
}

# Reason for adding entries to each table, keyed by its path.
ENTRIES = {
    "torch.nn.modules.module._global_parameter_registration_hooks": (
        "Notes every module, for `live_instances`."
    ),
    "torch.nn.modules.module._global_module_registration_hooks": "As above.",
    "torch.optim.optimizer._global_optimizer_pre_hooks": (
        "Raises if an optimizer steps parameters of a compiled model that was never sharded. Only "
        "while there are such models or unused backends."
    ),
    "torch.optim.optimizer._global_optimizer_post_hooks": (
        "Increments the versions of stepped DTensors, for backward to find changed parameters."
    ),
    "torch._dynamo.callback.callback_handler.start_callbacks": (
        "Shards a module before Dynamo traces it, and frees compiled graphs on a reset."
    ),
    "torch._dynamo.callback.callback_handler.end_callbacks": (
        "Adds advice to dtype errors of models with an mp_policy."
    ),
    "torch._dynamo.variables.torch.TorchInGraphFunctionVariable._get_handlers": (
        "Traces the results of unshard markers as parameters."
    ),
    "torch._dynamo.variables.builder.VariableBuilder._type_dispatch_impl": (
        "Traces a DTensor in a module's _parameters as its full parameter."
    ),
    "torch._dynamo.variables.base.VariableTrackerMeta.all_subclasses": (
        "Dynamo lists all classes of variables, including that of traced parameters."
    ),
    "torch._inductor.lowering.lowerings": (
        "Makes host copies asynchronous launches. Only for our own operators."
    ),
}


def patch(path: str, wrap: Callable[[Any], Any]) -> None:
    """Replace the attribute of torch at ``path``, one of `PATCHES`, with ``wrap(attribute)``."""
    assert path in PATCHES, f"{path}: add it to PATCHES, with the reason"
    owner_path, _, name = path.rpartition(".")
    owner = pkgutil.resolve_name(owner_path)
    setattr(owner, name, wrap(getattr(owner, name)))
