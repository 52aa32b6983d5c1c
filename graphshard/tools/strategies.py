"""``python -m graphshard strategies``: what others call a strategy or a habit, and how it is asked for here."""

from __future__ import annotations

import argparse
from typing import Any

from tabulate import tabulate

HEADERS = ("FSDP1", "FSDP2", "TorchAcc", "DeepSpeed", "graphshard", "what travels")
STRATEGIES = (
    (
        "FULL_SHARD",
        "fully_shard(model)",
        "dist.fsdp.size",
        "stage 3",
        "backend(mesh)",
        "gather in forward and in backward, reduce-scatter",
    ),
    (
        "SHARD_GRAD_OP",
        "reshard_after_forward=False",
        "",
        "stage 2",
        "reshard_after_forward=False",
        "gather in forward, reduce-scatter",
    ),
    (
        "NO_SHARD, DDP",
        "replicate(model)",
        "dist.dp.size",
        "stage 0",
        'overrides={"*": {"shard": False}}',
        "all-reduce",
    ),
    (
        "HYBRID_SHARD",
        "2D mesh (replicate, shard)",
        "dist.fsdp.size and dist.dp.size",
        "MiCS: mics_shard_size",
        "2D mesh (replicate, shard)",
        "as FULL_SHARD among shards; all-reduce of shards among replicas",
    ),
    (
        "_HYBRID_SHARD_ZERO2",
        "2D mesh, reshard_after_forward=False",
        "",
        "",
        "2D mesh, reshard_after_forward=False",
        "as SHARD_GRAD_OP among shards; all-reduce of shards among replicas",
    ),
    (
        "",
        "reshard_after_forward=8",
        "",
        "hpZ: zero_hpz_partition_size",
        "reshard_after_forward=8",
        "gather from all in forward, from 8 in backward; reduce-scatter",
    ),
)
HABITS = (
    (
        "ignored_states",
        "ignored_params",
        "",
        "",
        "ignored_params",
        "nothing",
    ),
    (
        "auto_wrap_policy",
        "fully_shard of each part",
        "dist.fsdp.wrap_layer_cls",
        "",
        "not needed",
        "buckets are planned",
    ),
    (
        "one policy per wrapped module",
        "one per part",
        "",
        "",
        'overrides={"*norm*": {...}}',
        "",
    ),
    (
        "mixed_precision",
        "mp_policy",
        "compute.bf16, compute.fp16",
        "bf16, fp16",
        "mp_policy",
        "casts are made before the gather",
    ),
    (
        "cpu_offload",
        "offload_policy",
        "",
        "offload_param, offload_optimizer",
        "offload_policy",
        "shards to the device before gathers, reduced gradients back",
    ),
    (
        "checkpoint_wrapper",
        "torch.utils.checkpoint",
        "memory.gc, memory.gc_cls",
        "deepspeed.checkpointing",
        "torch.utils.checkpoint, schedule.activation_memory_budget",
        "",
    ),
    (
        "limit_all_gathers",
        "",
        "",
        "stage3_max_live_parameters",
        "schedule.max_in_flight_gb",
        "",
    ),
    (
        "no_sync()",
        "set_requires_gradient_sync",
        "",
        "no_sync()",
        "graphshard.no_sync, graphshard.set_requires_gradient_sync",
        "nothing; one reduction at the end",
    ),
    (
        "",
        "set_requires_all_reduce",
        "",
        "",
        "graphshard.set_requires_all_reduce",
        "reduce-scatter; one all-reduce at the end",
    ),
    (
        "clip_grad_norm_",
        "torch.nn.utils.clip_grad_norm_",
        "",
        "",
        "the same as FSDP2",
        "one number",
    ),
    (
        "sync_module_states",
        "",
        "dist.fsdp.sync_module_states",
        "",
        "sync_module_states",
        "broadcast, once",
    ),
)


def table(tablefmt: str = "simple") -> str:
    """All rows; as ``tabulate`` formats them."""
    return tabulate([*STRATEGIES, *HABITS], HEADERS, tablefmt=tablefmt, disable_numparse=True)


def add_parser(commands: Any) -> None:
    """Add the command to those of ``python -m graphshard``."""
    text = "show how strategies and habits of FSDP, TorchAcc and DeepSpeed are asked for here"
    parser = commands.add_parser("strategies", help=text, description=text)
    parser.set_defaults(run=_run, parser=parser)


def _run(_: argparse.Namespace) -> int:
    print(table())
    return 0
