"""Configure torchtitan's trainer to shard and compile the model with graphshard.

    Trainer.__init__                      parallelize()
    a model on the meta device      ───►  torchtitan's tensor and expert parallelism and activation
                                          checkpointing
                                          sharded over the mesh axes "fsdp" (and "dp_replicate"),
                                          experts over "efsdp"
    to_empty, init_weights          ◄───  compiled in place; gradients are summed
    each step                             losses are sums divided by the tokens of all ranks

The loss must take logits: with ``ChunkedLossWrapper`` torchtitan calls the last layer in chunks,
outside the model's forward and therefore outside its graph. Based on torchtitan 0.3:
``trainer.py``, ``distributed/fsdp.py``, ``models/llama3/parallelize.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from types import ModuleType
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig
from torchtitan.distributed.fsdp import get_fsdp_reshard_after_forward_policy
from torchtitan.trainer import Trainer

from ..._torch.dynamo import capture_scalar_outputs
from ...dynamo_backend import backend
from ...params.grad_sync import set_gradient_divide_factor
from ..common import shard_and_compile

# With this ``spmd_backend`` torchtitan neither makes DTensors of a step's inputs nor checks their
# types.
_SPMD = "partial_dtensor"


def configure(config: Trainer.Config, **options: Any) -> Trainer.Config:
    """Change ``config`` in place to train its model with graphshard, and return it.

    Other settings still apply: optimizer, data, activation checkpointing, checkpoints and
    command-line overrides. ``--compile.backend`` sets graphshard's ``compiler``; with
    ``--compile.enable`` torchtitan also compiles the loss. CUDA graphs over a step are disabled,
    and a chunked loss is replaced by the loss inside it.

    Args:
        config: torchtitan configuration with a model.
        options: other arguments of :func:`graphshard.backend`. ``mesh``, ``mp_policy``,
            ``offload_policy``, ``reshard_after_forward`` and ``compiler`` come from torchtitan's
            settings.

    Raises:
        ValueError: ``config`` has no model, or an option duplicates a torchtitan setting. When the
            trainer is created: graphshard does not support a setting, such as context or pipeline
            parallelism, or rejects an option.
    """
    set_by_torchtitan = {"mesh", "mp_policy", "offload_policy", "reshard_after_forward", "compiler"}
    if taken := sorted(set_by_torchtitan & options.keys()):
        raise ValueError(
            f"{', '.join(taken)}: torchtitan's settings determine these options; set them there"
        )
    if config.model_spec is None:
        raise ValueError("config.model_spec is None: set the model first")
    shards = partial(parallelize, options=options)
    config.model_spec = replace(config.model_spec, parallelize_fn=shards)
    config.parallelism.spmd_backend = _SPMD
    config.training.disable_cuda_graphs = True
    if isinstance(config.loss, ChunkedLossWrapper.Config):
        config.loss = config.loss.loss_fn
    return config


def configs_of(registry: ModuleType) -> dict[str, Callable[[], Trainer.Config]]:
    """Return a torchtitan ``config_registry``'s functions by name, wrapped in :func:`configure`."""

    def configured(make: Callable[[], Trainer.Config]) -> Callable[[], Trainer.Config]:
        return lambda: configure(make())

    return {
        name: configured(make)
        for name, make in vars(registry).items()
        if callable(make) and getattr(make, "__module__", "") == registry.__name__
    }


def parallelize(
    model: nn.Module,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: CompileConfig,
    ac_config: ActivationCheckpointingConfig,
    dump_folder: str,
    options: dict[str, Any],
) -> nn.Module:
    """Apply torchtitan's parallelism and checkpointing, then shard and compile ``model``, in place.

    This is the ``parallelize_fn`` of torchtitan's ``model_spec``.

    Raises:
        ValueError: graphshard does not support a setting, or rejects an option.
    """
    _check(parallel_dims, parallelism)
    if parallel_dims.tp_enabled or parallel_dims.ep_enabled:
        _split(model, parallel_dims)
    if parallel_dims.ep_enabled:
        capture_scalar_outputs()  # all-to-alls have sizes that depend on data
    options = {
        "mesh": _mesh(parallel_dims, "fsdp"),
        "reshard_after_forward": get_fsdp_reshard_after_forward_policy(
            parallelism.fsdp_reshard_after_forward, pp_enabled=False
        ),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
            reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
            cast_forward_inputs=False,
        ),
        "offload_policy": CPUOffloadPolicy() if training.enable_cpu_offload else None,
        "compiler": compile_config.backend,
        **options,
        "overrides": {
            **_expert_overrides(model, parallel_dims),
            **(options.get("overrides") or {}),
        },
    }
    dynamo_backend = backend(**options)
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
        _count_tokens_once(model)
    shard_and_compile(model, dynamo_backend, options)
    set_gradient_divide_factor(model, 1.0)
    return model


def _split(model: Any, parallel_dims: ParallelDims) -> None:
    model.parallelize(parallel_dims)
    # The call unties the embeddings. torchtitan ties them again only when it initializes the model,
    # but they must be tied when they are sharded.
    if model.enable_weight_tying:
        model.tok_embeddings.weight = model.lm_head.weight


def _mesh(parallel_dims: ParallelDims, name: str) -> DeviceMesh:
    names = ["dp_replicate", name] if parallel_dims.dp_replicate_enabled else [name]
    return parallel_dims.get_mesh(names)


def _expert_overrides(model: nn.Module, parallel_dims: ParallelDims) -> dict[str, dict[str, Any]]:
    """Return ``overrides`` that shard experts over the mesh axes that torchtitan uses for them."""
    glob, axis = "*.inner_experts", "efsdp" if parallel_dims.ep_enabled else "fsdp"
    mesh = _mesh(parallel_dims, axis)
    numbers = [m.num_experts for name, m in model.named_modules() if fnmatchcase(name, glob)]
    if not numbers:
        return {}
    # With more ranks than experts, torchtitan splits each expert, too.
    dim = int(mesh[axis].size() * parallel_dims.ep > min(numbers))
    return {glob: {"dim": dim, "mesh": mesh if parallel_dims.ep_enabled else None}}


def _count_tokens_once(model: nn.Module) -> None:
    """Keep torchtitan from halving the token counts of experts in checkpointed blocks."""
    # To balance experts, torchtitan compares their token counts with the mean. It first halves the
    # counts of a checkpointed block, rounding down, because eager recomputation counts every token
    # twice. A compiled graph counts once, so rounding could adjust the bias of an expert in the
    # wrong direction.
    for module in model.modules():
        if hasattr(module, "checkpoint_impl"):  # how torchtitan recognizes checkpointed blocks
            module.checkpoint_impl = None  # type: ignore[assignment]


def _check(dims: ParallelDims, parallelism: ParallelismConfig) -> None:
    for name, enabled in (("context", dims.cp_enabled), ("pipeline", dims.pp_enabled)):
        if enabled:
            raise ValueError(
                f"parallelism.{name}_parallel_degree is more than 1: only data, tensor and expert "
                "parallelism are supported; set it to 1"
            )
    if parallelism.spmd_backend != _SPMD:
        raise ValueError(
            f"parallelism.spmd_backend={parallelism.spmd_backend!r}: graphshard shards plain "
            f"parameters itself; set it to {_SPMD!r}"
        )
    if parallelism.enable_fsdp_symm_mem:
        raise ValueError(
            "parallelism.enable_fsdp_symm_mem=True: requires FSDP2, which graphshard replaces; set "
            "it to False"
        )
