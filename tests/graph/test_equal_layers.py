"""Layers that AOTAutograd traces as one have the plans of layers traced one by one."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import torch
from torch.distributed.device_mesh import DeviceMesh

import graphshard
from graphshard.passes import layers
from tests.numerics.test_equal_layers import Layer, Model, train


def test_shared_checkpoints_have_same_plan(mesh: DeviceMesh) -> None:
    plans = []
    for least_saved in (10, 10**9):
        torch._dynamo.reset()
        backend = graphshard.backend(mesh, compiler="aot_eager")
        with mock.patch.object(layers, "_LEAST_SAVED", least_saved):
            # Place different checkpoints before, between and after the shared ones.
            others = [Layer("checkpoint", scale=scale) for scale in (2.0, 3.0, 4.0)]
            equal = [[Layer("checkpoint") for _ in range(2)] for _ in range(2)]
            parts = [others[:1], equal[0], others[1:2], equal[1], others[2:]]
            model = Model([layer for part in parts for layer in part])
            train(model, torch.compile(model, backend=backend))
        assert ("layers as one" in backend.summary()) == (least_saved == 10)
        # Ignore the names of steps, which are lost when nodes are copied.
        problems = [replace(plan.problem, steps=()) for plan in backend.plans]
        plans.append([replace(p, problem=q) for p, q in zip(backend.plans, problems)])
    assert plans[0] == plans[1]
