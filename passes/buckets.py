"""Forward, backward and inference graph: which markers travel together.

A parameter that is large travels alone, without a copy. Small ones would cost a launch each, so
neighbours in graph order share a buffer: it is gathered where the first of them is used, and
reduced where the last of their gradients is made.

    unshard(a) ... unshard(b) ... unshard(LARGE) ... unshard(c)      ─►  [a, b, c] [LARGE]
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from graphshard import ops

# A launch costs as much as a megabyte on the wire does, within a factor of a few, on NVLink and on
# Ethernet alike; what is gathered early stays below what one block of a model takes.
SMALL_BYTES = 1 << 20
CAP_BYTES = 4 << 20


def plan_buckets(
    markers: Iterable[fx.Node], *, small_bytes: int = SMALL_BYTES, cap_bytes: int = CAP_BYTES
) -> list[list[fx.Node]]:
    """Markers that communicate, in groups, each in graph order; groups in order of launch. Pure."""
    order = {marker: i for i, marker in enumerate(markers) if marker.target is not ops.replicate}
    open_buckets: dict[Any, list[fx.Node]] = {}
    buckets: list[list[fx.Node]] = []
    for marker in order:
        key = _key(marker)
        bucket = open_buckets.get(key) if _packs(marker, small_bytes) else None
        if bucket is not None and _size(*bucket, marker) <= cap_bytes:
            bucket.append(marker)
            continue
        buckets.append([marker])
        if _packs(marker, small_bytes):
            open_buckets[key] = buckets[-1]
    return sorted(buckets, key=lambda bucket: order[launch_marker(bucket)])


def launch_marker(bucket: list[fx.Node]) -> fx.Node:
    """Where a bucket is launched: gathers at the first marker, reductions at the last."""
    return bucket[0] if bucket[0].target is ops.unshard else bucket[-1]


def _key(marker: fx.Node) -> tuple[Any, ...]:
    value: torch.Tensor = marker.meta["val"]
    group = next(arg for arg in marker.args if isinstance(arg, str))
    return marker.target, value.dtype, value.device, group


def _packs(marker: fx.Node, small_bytes: int) -> bool:
    if marker.target is ops.all_reduce_grad or marker.meta["val"].dtype not in ops.ON_THE_WIRE:
        return False
    if marker.target is ops.reduce_grad and any(user.op != "output" for user in marker.users):
        return False  # needed before the last gradient of its bucket may exist
    return _size(marker) <= small_bytes


def _size(*markers: fx.Node) -> int:
    """Bytes of the full tensors."""
    full = [m if m.target is ops.unshard else m.args[0] for m in markers]
    return sum(node.meta["val"].nbytes for node in full)  # type: ignore[union-attr]
