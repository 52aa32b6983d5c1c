"""The command ``python -m graphshard strategies``: how to get what other libraries offer."""

from __future__ import annotations

import argparse
from dataclasses import astuple, dataclass

from tabulate import tabulate


@dataclass(frozen=True, kw_only=True)
class Row:
    """One strategy or feature, by its name in each library; "" if a library lacks it.

    Attributes:
        what_travels: collectives of a training step.
    """

    fsdp1: str = ""
    fsdp2: str = ""
    torchacc: str = ""
    deepspeed: str = ""
    graphshard: str = ""
    what_travels: str = ""


HEADERS = ("FSDP1", "FSDP2", "TorchAcc", "DeepSpeed", "graphshard", "what travels")
"""Column titles, one for each field of ``Row``."""

STRATEGIES = (
    Row(
        fsdp1="FULL_SHARD",
        fsdp2="fully_shard(model)",
        torchacc="dist.fsdp.size",
        deepspeed="stage 3",
        graphshard="backend(mesh)",
        what_travels="gather in forward and in backward, reduce-scatter",
    ),
    Row(
        fsdp1="SHARD_GRAD_OP",
        fsdp2="reshard_after_forward=False",
        deepspeed="stage 2",
        graphshard="reshard_after_forward=False",
        what_travels="gather in forward, reduce-scatter",
    ),
    Row(
        fsdp1="NO_SHARD, DDP",
        fsdp2="replicate(model)",
        torchacc="dist.dp.size",
        deepspeed="stage 0",
        graphshard='overrides={"*": {"shard": False}}',
        what_travels="all-reduce",
    ),
    Row(
        fsdp1="HYBRID_SHARD",
        fsdp2="2D mesh (replicate, shard)",
        torchacc="dist.fsdp.size and dist.dp.size",
        deepspeed="MiCS: mics_shard_size",
        graphshard="2D mesh (replicate, shard)",
        what_travels="as FULL_SHARD among shards; all-reduce of shards among replicas",
    ),
    Row(
        fsdp1="_HYBRID_SHARD_ZERO2",
        fsdp2="2D mesh, reshard_after_forward=False",
        graphshard="2D mesh, reshard_after_forward=False",
        what_travels="as SHARD_GRAD_OP among shards; all-reduce of shards among replicas",
    ),
    Row(
        fsdp2="reshard_after_forward=8",
        deepspeed="hpZ: zero_hpz_partition_size",
        graphshard="reshard_after_forward=8",
        what_travels="gather from all in forward, from 8 in backward; reduce-scatter",
    ),
)
"""What is sharded, and for how long it stays unsharded."""

HABITS = (
    Row(
        fsdp1="ignored_states",
        fsdp2="ignored_params",
        graphshard="ignored_params",
        what_travels="nothing",
    ),
    Row(
        fsdp1="auto_wrap_policy",
        fsdp2="fully_shard of each part",
        torchacc="dist.fsdp.wrap_layer_cls",
        graphshard="not needed",
        what_travels="buckets are planned",
    ),
    Row(
        fsdp1="one policy per wrapped module",
        fsdp2="one per part",
        graphshard='overrides={"*norm*": {...}}',
    ),
    Row(
        fsdp1="mixed_precision",
        fsdp2="mp_policy",
        torchacc="compute.bf16, compute.fp16",
        deepspeed="bf16, fp16",
        graphshard="mp_policy",
        what_travels="casts are made before the gather",
    ),
    Row(
        fsdp1="cpu_offload",
        fsdp2="offload_policy",
        deepspeed="offload_param, offload_optimizer",
        graphshard="offload_policy",
        what_travels="shards to the device before gathers, reduced gradients back",
    ),
    Row(
        fsdp1="checkpoint_wrapper",
        fsdp2="torch.utils.checkpoint",
        torchacc="memory.gc, memory.gc_cls",
        deepspeed="deepspeed.checkpointing",
        graphshard="torch.utils.checkpoint, schedule.activation_memory_budget",
    ),
    Row(
        fsdp1="limit_all_gathers",
        deepspeed="stage3_max_live_parameters",
        graphshard="schedule.max_in_flight_gb",
    ),
    Row(
        fsdp1="no_sync()",
        fsdp2="set_requires_gradient_sync",
        deepspeed="no_sync()",
        graphshard="graphshard.no_sync, graphshard.set_requires_gradient_sync",
        what_travels="nothing; one reduction at the end",
    ),
    Row(
        fsdp2="set_requires_all_reduce",
        graphshard="graphshard.set_requires_all_reduce",
        what_travels="reduce-scatter; one all-reduce at the end",
    ),
    Row(
        fsdp1="clip_grad_norm_",
        fsdp2="torch.nn.utils.clip_grad_norm_",
        graphshard="the same as FSDP2",
        what_travels="one number",
    ),
    Row(
        fsdp1="sync_module_states",
        torchacc="dist.fsdp.sync_module_states",
        graphshard="sync_module_states",
        what_travels="broadcast, once",
    ),
)
"""Other features that training scripts use."""


def table(tablefmt: str = "simple") -> str:
    """Return the table of all rows, in a format of ``tabulate``."""
    rows = [astuple(row) for row in (*STRATEGIES, *HABITS)]
    return tabulate(rows, HEADERS, tablefmt=tablefmt, disable_numparse=True)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``strategies`` command to ``python -m graphshard``."""
    text = "show how strategies and habits of FSDP, TorchAcc and DeepSpeed are asked for here"
    parser = commands.add_parser("strategies", help=text, description=text)
    parser.set_defaults(run=_run, parser=parser)


def _run(_: argparse.Namespace) -> int:
    print(table())
    return 0
