from __future__ import annotations

import pytest

from graphshard.cost.devices import HARDWARE
from graphshard.cost.model import CostModel
from graphshard.kinds import HOST_COPIES, GraphKind, TransferKind
from graphshard.ops.markers import SPECS
from graphshard.pipeline import verify
from graphshard.planning import buckets
from graphshard.show.page import TEMPLATE
from graphshard.show.trace import _KERNEL_NAMES


@pytest.mark.parametrize("kind", TransferKind)
def test_every_kind_is_in_every_table(kind: TransferKind) -> None:
    assert kind in _KERNEL_NAMES
    assert kind in buckets._CHAIN
    assert f" {kind}: [" in TEMPLATE.read_text()  # KINDS
    assert CostModel(HARDWARE["H100"]).collective_us(kind, 1 << 20, world=8) > 0


@pytest.mark.parametrize("kind", TransferKind)
def test_every_kind_is_reduction_fetch_or_copy_to_host(kind: TransferKind) -> None:
    assert [kind.is_reduction, kind.is_fetch, kind == TransferKind.COPY_TO_HOST].count(True) == 1


def test_verifier_knows_launch_op_of_every_kind() -> None:
    # Launched by ALL_REDUCE's op; for the maximum, with different arguments.
    variants = {TransferKind.ALL_REDUCE_MAX, TransferKind.ALL_REDUCE_SHARDS}
    assert set(verify._KIND_OF_LAUNCH.values()) == set(TransferKind) - variants


def test_every_kind_except_all_reduces_of_shards_has_a_marker() -> None:
    kinds = {spec.kind for spec in SPECS.values()} - {None}
    assert kinds == set(TransferKind) - {TransferKind.ALL_REDUCE_SHARDS}
    assert set(HOST_COPIES) < set(TransferKind)


def test_repr_of_kind_is_its_value() -> None:
    assert (
        f"{TransferKind.ALL_GATHER!r} of {(GraphKind.FORWARD,)}" == "'all_gather' of ('forward',)"
    )
