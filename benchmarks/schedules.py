"""Schedules by FSDP2's rule, and the problems of traced graphs on other numbers of ranks.

FSDP2's rule has a bucket per block and one for the rest. A gather is launched when the one before
it has arrived. A reduction is launched when its block's gradients are ready, and waited for when
the next is launched.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from graphshard.kinds import TransferKind
from graphshard.planning.buckets import bucket_of, in_launch_order
from graphshard.planning.live_bytes import fixed_by_point, with_fixed_bytes
from graphshard.planning.plan import Bucket, Plan, Problem, Transfer


def at_world(plan: Plan, world: int) -> Problem:
    """Return the problem of ``plan`` with the shards and the padding of ``world`` ranks.

    Full parameters that are freed before their last step ends keep the traced padding.
    """
    before = plan.problem
    transfers = tuple(_resized(plan, transfer, world) for transfer in before.transfers)
    # Shards are inputs: they are alive throughout.
    grown = sum(
        new.num_bytes // new.world - old.num_bytes // old.world
        for new, old in zip(transfers, before.transfers)
        if new.kind == TransferKind.ALL_GATHER
    )
    return _with_more_bytes(dataclasses.replace(before, transfers=transfers), grown)


def _with_more_bytes(problem: Problem, num_bytes: int) -> Problem:
    other = [alive + num_bytes for alive in fixed_by_point(problem)]
    return with_fixed_bytes(problem, other)


def _resized(plan: Plan, transfer: Transfer, world: int) -> Transfer:
    param = plan.params[transfer.param]
    assert param.padded_rows is not None
    row_bytes = transfer.num_bytes // (param.padded_rows * transfer.world)
    rows = math.ceil(param.shape[0] / world)
    shard_bytes = transfer.shard_bytes // param.padded_rows * rows
    num_bytes = rows * world * row_bytes
    was_padded, is_padded = (
        bool(transfer.grad_bytes) and sent_rows != param.shape[0]
        for sent_rows in (param.padded_rows * transfer.world, rows * world)
    )
    return dataclasses.replace(
        transfer,
        num_bytes=num_bytes,
        shard_bytes=shard_bytes,
        world=world,
        copied_in=is_padded or (transfer.copied_in and not was_padded),
    )


# --- rules ---------------------------------------------------------------------------------------

Positions = list[int]
"""Positions in ``Problem.transfers`` of the transfers in a bucket."""


class Blocks(NamedTuple):
    gathers: list[Positions]
    reductions: list[Positions]


def by_block(plan: Plan, problem: Problem) -> Blocks:
    """Return the transfers of each block, and of the rest of the model, in launch order."""
    gathers: dict[str, list[int]] = {}
    reductions: dict[str, list[int]] = {}
    for i, transfer in enumerate(problem.transfers):
        parts = plan.params[transfer.param].fqn.split(".")
        unit = parts[1] if parts[0] == "blocks" else "root"
        (gathers if transfer.kind == TransferKind.ALL_GATHER else reductions).setdefault(
            unit, []
        ).append(i)
    return Blocks(
        gathers=sorted(gathers.values(), key=lambda positions: _due(problem, positions)),
        reductions=sorted(reductions.values(), key=lambda positions: _ready(problem, positions)),
    )


def _due(problem: Problem, positions: Sequence[int]) -> int:
    return min(problem.transfers[i].due for i in positions)


def _ready(problem: Problem, positions: Sequence[int]) -> int:
    return max(problem.transfers[i].ready for i in positions)


def _bucket(problem: Problem, positions: Sequence[int], launch: int, wait: int) -> Bucket:
    return bucket_of(problem, (tuple(positions),), launch=launch, wait=wait)


def fsdp2_rule(plan: Plan, problem: Problem) -> Sequence[Bucket]:
    """Schedule as eager FSDP2 does by default (``_fsdp_param_group.py``)."""
    blocks = by_block(plan, problem)
    due = [_due(problem, positions) for positions in blocks.gathers]
    ready = [_ready(problem, positions) for positions in blocks.reductions]
    launches = [0, *due[:-1]]
    waits = [*ready[1:], problem.num_steps]
    buckets = [_bucket(problem, *row) for row in zip(blocks.gathers, launches, due)]
    buckets += [_bucket(problem, *row) for row in zip(blocks.reductions, ready, waits)]
    return in_launch_order(buckets)


def uncopied(plan: Plan, problem: Problem) -> list[Bucket]:
    """Schedule as ``fsdp2_rule``, but with coalesced collectives instead of packed buffers."""
    buckets = fsdp2_rule(plan, problem)
    return [dataclasses.replace(b, buffers=tuple((i,) for i in b.transfers)) for b in buckets]
