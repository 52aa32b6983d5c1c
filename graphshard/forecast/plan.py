"""Forecast a training step: trace the model, or copies with fewer layers, and plan its graphs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from ..planning.memory_budget import Reduce
from ..scripts import Inputs
from ..show.dump import Dump
from ..show.table import exposed_reason, is_notable
from ..tensor_parallel import Parallelize
from .cluster import Cluster
from .derive import Progress, trace_step
from .forecast import Exposed, Forecast
from .planned_step import find_bottleneck, find_changes, plan_step
from .recipe import Recipe
from .report import ShownForecast
from .trace import TracedStep
from .workload import Workload, module_workload, recomputed_layers

_MAX_EXPOSED = 8  # maximum length of ``Forecast.exposed``


def plan(
    model: nn.Module,
    inputs: Inputs,
    cluster: Cluster,
    *,
    strategy: str = "zero3",
    dtype: str = "bf16",
    optimizer: str = "adamw",
    recompute: float = 0.0,
    accumulate: int = 1,
    budget_gb: float | None = None,
    offload: bool = False,
    tp: int = 1,
    parallelize: Parallelize | None = None,
    reduce: Reduce = "ring",
    ep: int = 1,
) -> Forecast:
    """Forecast a training step of a model on a cluster that need not exist.

    Nothing is computed, and the model is not modified: its graphs are traced with fake tensors and
    fake ranks, planned as ``graphshard.backend`` plans them, and simulated. Dynamo's caches are
    reset, so functions that this process compiled before are recompiled at their next call.

    Args:
        model: unsharded model on any device, including meta. The loss is the ``loss`` of its
            outputs, or their first tensor (summed, unless it is a scalar).
        inputs: inputs of one microbatch on one rank, or on the ``tp`` ranks that share it: a tuple
            of positional arguments, or a dictionary of keyword arguments. Values do not matter.
        cluster: cluster from :func:`graphshard.cluster`.
        strategy: "zero3", "zero2", "hsdp:N", "hpz:N" or "ddp", where N is a number of ranks.
        dtype: "float32"; "bf16": parameters gathered and used in bfloat16, gradients reduced in
            float32; "fp8": as "bf16", with inner linears in fp8.
        optimizer: "adamw", "adam", "momentum" or "sgd"; fused.
        recompute: fraction of the layers that backward recomputes, starting with the first: from 0
            to 1; True for all.
        accumulate: number of microbatches in a step; each reduces its gradients.
        budget_gb: limit for the peak of each graph plus the parameters, gradients, optimizer state
            and buffers that a rank holds outside of it, in GB (1e9 bytes; default: no limit).
        offload: whether the host keeps shards, gradients and optimizer state, as with
            ``CPUOffloadPolicy()``.
        tp: number of neighboring ranks over which ``parallelize`` splits the model. The N of
            ``strategy`` counts groups of ``tp`` ranks.
        parallelize: function ``parallelize(model, mesh)`` that applies torch's
            ``parallelize_module`` to a copy of the model; required if ``tp`` > 1. If ``ep`` > 1, a
            function that splits experts (default: ``expert_parallel.parallelize_balanced``).
        reduce: "ring", "exchange" or "auto": how gradients are reduced, as in ``SchedulePolicy``.
        ep: number of neighboring ranks, each with its own microbatch, over which experts are split.

    Raises:
        ValueError: an argument is invalid, ``ep``, ``tp``, or ``tp`` times the strategy's N does
            not divide the number of GPUs, the model has no loss or no trainable parameter, memory
            outside of the graphs alone exceeds ``budget_gb``, or shapes or control flow depend on
            values of tensors.
        BackendError: no schedule stays within ``budget_gb``.
        RuntimeError: this process already has a process group.
    """
    recipe = Recipe(
        strategy, dtype, optimizer, recompute, accumulate, budget_gb, offload, tp, reduce, ep
    )
    return forecast(module_workload(model, inputs, parallelize), recipe, cluster)


def forecast(
    workload: Workload,
    recipe: Recipe,
    cluster: Cluster,
    progress: Progress = lambda text: None,
    traced: TracedStep | None = None,
) -> Forecast:
    """Forecast a step of a workload, tracing it unless ``traced`` is given; see ``plan``."""
    traced = traced or trace_step(workload, recipe, cluster, progress)
    progress("planning")
    recomputed: tuple[str, ...] = ()
    if 0 < recipe.recompute < 1:
        with torch.device("meta"):
            model, _ = workload.make(None)
        recomputed = recomputed_layers(model, recipe.recompute)
    step = plan_step(traced, recipe, cluster)
    changes = find_changes(traced, recipe, cluster)
    peak_us = recipe.accumulate * sum(graph.problem.peak_us for graph in traced.graphs)
    return ShownForecast(
        model=workload.name,
        num_params=int(traced.held.num_params),
        cluster=cluster,
        recipe=recipe,
        tokens=workload.tokens * recipe.accumulate * cluster.num_gpus // recipe.tp,
        unit=workload.unit,
        time=step.time,
        memory=step.memory,
        mfu=peak_us / step.time.step_us,
        exposed=tuple(_exposed(step.dumps, recipe.accumulate)),
        binds=find_bottleneck(step.memory, changes),
        changes=tuple(sorted(changes, key=lambda change: -change.gain)),
        dumps=step.dumps,
        graphs=step.graphs,
        held=traced.held,
        notes=(*workload.notes, *traced.notes, *_notes(recipe, cluster)),
        recomputed=recomputed,
    )


def _notes(recipe: Recipe, cluster: Cluster) -> list[str]:
    notes = []
    if recipe.dtype == "float32" and cluster.hardware.device_type == "cuda":
        notes.append(
            "attention in float32 is a flash kernel; CUDA's float32 attention takes more memory"
        )
    if recipe.ep > 1:
        notes.append("routers send equal numbers of tokens to each rank")
    if recipe.offload:
        per_s = cluster.hardware.host_memory.largest / 1e9
        notes.append(
            f"the optimizer on the host reads and writes {per_s:.0f} GB/s per GPU, which requires "
            "that each rank uses its share of the cores: set OMP_NUM_THREADS, because torchrun "
            "sets it to 1"
        )
    return notes


def _exposed(dumps: Sequence[Dump], num_microbatches: int) -> list[Exposed]:
    exposed = [
        Exposed(
            f"{dump.plan.graph} {bucket.kind} of {dump.bucket_label(bucket)}",
            us,
            exposed_reason(dump, i),
        )
        for dump in dumps
        for i, (bucket, us) in enumerate(zip(dump.plan.buckets, dump.timeline.exposed_us))
        if is_notable(us)
    ]
    exposed += itertools.chain.from_iterable(map(_user_exposed, dumps))
    longest = sorted(exposed, key=lambda one: -one.us)[:_MAX_EXPOSED]
    return [dataclasses.replace(one, us=num_microbatches * one.us) for one in longest]


def _user_exposed(dump: Dump) -> Iterator[Exposed]:
    # One row for each operator: a split model calls it several times in every layer.
    us_by_op: dict[str, list[float]] = {}
    for user, us in zip(dump.plan.problem.user_collectives, dump.timeline.user_exposed_us):
        us_by_op.setdefault(user.op, []).append(us)
    for op, times_us in us_by_op.items():
        if is_notable(sum(times_us)):
            what = f"{dump.plan.graph} user {op} ({len(times_us)})"
            yield Exposed(what, sum(times_us), "called by the model: not scheduled by graphshard")
