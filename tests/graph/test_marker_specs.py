"""A marker's spec defines its schema and its call, and can be read back from its node."""

from __future__ import annotations

import pytest
import torch

from graphshard.ops import markers
from graphshard.ops.marker_specs import MarkerSpec, ReduceGradSpec, ReplicateSpec, UnshardSpec
from tests.graph.builder import Builder


@pytest.mark.parametrize("spec", markers.SPECS.values(), ids=lambda spec: spec.name)
def test_schema_survives_parsing_by_torch(spec: type[MarkerSpec]) -> None:
    schema = spec.op()._schema
    assert str(schema) == f"graphshard::{spec.schema()}"
    assert tuple(argument.name for argument in schema.arguments) == spec.argument_names()
    assert (
        spec.argument_names()[-len(spec.accumulators) or len(schema.arguments) :]
        == spec.accumulators
    )


def test_spec_is_read_back_from_its_node(group: str) -> None:
    build = Builder(group)
    fields = {"shard": build.primal(2, 3), "rows": 13, "group": group, "dtype": torch.bfloat16}
    spec = UnshardSpec(**fields)
    read = markers.read(build.marker(spec))
    assert isinstance(read, UnshardSpec) and read.arguments() == spec.arguments()
    assert (read.shard, read.rows, read.regather_group) == (fields["shard"], 13, None)


def test_changed_arguments_change_value(group: str) -> None:
    build = Builder(group)
    node = build.unshard(build.primal(2, 3), 13)
    markers.change(node, dtype=torch.bfloat16)
    assert node.meta["val"].dtype == torch.bfloat16
    assert UnshardSpec.of_node(node).regather_group == group


def test_marker_of_another_kind_is_refused(group: str) -> None:
    build = Builder(group)
    with pytest.raises(AssertionError, match="is not a call of reduce_grad"):
        ReduceGradSpec.of_node(build.unshard(build.primal(2, 3), 13))


def test_gradients_are_at_positions_of_their_arguments() -> None:
    grad = torch.ones(1)
    assert UnshardSpec.gradients(shard=grad) == (grad, *[None] * 14)
    assert ReplicateSpec.gradients(unsynced=grad) == (*[None] * 4, grad)
    with pytest.raises(AssertionError):
        ReplicateSpec.gradients(shard=grad)
