"""Equal layers, which AOTAutograd traces as one, train bitwise like those of an eager model."""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._guards import InvokeSubgraphCache
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import graphshard
from tests.ranks import on_ranks

DIM, LAYERS = 8, 4
# Since torch 2.13, ``torch.linalg`` checks for errors with an operator that has side effects.
HAVE_EFFECTS = torch.__version__ >= (2, 13)


class Layer(nn.Module):
    def __init__(self, kind: str = "", scale: float = 1.0, table: Any = None) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, DIM) for _ in range(3))
        self.norm = nn.BatchNorm1d(DIM) if kind == "buffers" else nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.router = nn.Linear(DIM, 2) if kind == "experts" else None
        self.scale, self.kind, self.table = scale, kind, table

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.kind == "sizes":
            x = x + torch.arange(len(x))[:, None] * x.mean(0) / len(x)
        mixed = F.scaled_dot_product_attention(self.q(y)[None], self.k(y)[None], self.v(y)[None])
        if self.kind == "inverse":
            x = x + torch.linalg.inv(self.q.weight)[:1]
        if self.kind == "writes":
            return mixed[0].add_(x)
        if self.kind.startswith("literals"):
            # AOTAutograd stores literals as attributes of the layer's graph.
            return x + mixed[0] * torch.tensor(0.5)
        hidden = F.silu(self.up(x + mixed[0]))
        if self.router is not None:
            weight, choice = torch.topk(self.router(y).softmax(-1), 1)
            hidden = hidden.unflatten(1, (2, DIM)) * torch.zeros(len(x), 2, 1).scatter(
                1, choice[..., None], weight[..., None]
            )
            hidden = hidden.flatten(1)
        return x + self.scale * F.dropout(self.down(hidden), 0.1, self.training)


def _table(number: int) -> Callable[[], Tensor]:
    """Return a function whose result is an attribute of the traced graph."""

    def table() -> Tensor:
        return torch.full((DIM,), float(number))

    table.__code__ = table.__code__.replace(co_name=f"table_{number}")  # names the attribute
    return torch._dynamo.assume_constant_result(table)  # type: ignore[no-any-return]


def _policy_with_an_empty_cell(saves: bool) -> Any:
    if saves:
        saved = {torch.ops.aten.addmm.default}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = saves and op in saved
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


_PRODUCTS = [torch.ops.aten.addmm.default]  # saved by "policy", which recomputes all other values
_by_policy = functools.partial(create_selective_checkpoint_contexts, _PRODUCTS)

_CALLS: dict[str, Callable[[Layer, Tensor], Tensor]] = {
    "checkpoint": functools.partial(checkpoint, use_reentrant=False),
    "sizes": functools.partial(checkpoint, use_reentrant=False),
    "policy": functools.partial(checkpoint, use_reentrant=False, context_fn=_by_policy),
    "empty cell": functools.partial(
        checkpoint, use_reentrant=False, context_fn=_policy_with_an_empty_cell(False)
    ),
    "tables": lambda layer, x: checkpoint(
        lambda y, table: layer(y) + table, x, layer.table(), use_reentrant=False
    ),
    "literals in a checkpoint": functools.partial(checkpoint, use_reentrant=False),
    "part": lambda layer, x: layer(x) + checkpoint(layer.norm, x, use_reentrant=False),
}
"""Functions that call a layer, by its kind; layers of other kinds are called directly."""


class Model(nn.Module):
    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(DIM, DIM), nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        conjugate = torch.view_as_complex(self.first.weight.view(DIM, -1, 2)).conj()
        for layer in self.layers:
            if layer.kind == "conjugate":
                x = x + conjugate.exp().real.sum()
            x = _CALLS.get(layer.kind, nn.Module.__call__)(layer, x)  # type: ignore[arg-type]
        return x.square().mean()


def _frozen() -> list[Layer]:
    layers = [Layer() for _ in range(LAYERS)]
    layers[0].requires_grad_(False)
    return layers


def _of_kind(kind: str) -> list[Layer]:
    return [Layer(kind) for _ in range(LAYERS)]


CASES: dict[str, tuple[Callable[[], list[Layer]], int]] = {
    "dropout": (lambda: _of_kind(""), LAYERS),
    "experts": (lambda: _of_kind("experts"), LAYERS),
    "frozen": (_frozen, LAYERS - 1),
    "tied": (lambda: [Layer()] * 5, 4),
    "sizes": (lambda: _of_kind("sizes"), 2 * LAYERS),
    "policy": (lambda: _of_kind("policy"), LAYERS),
    "part": (lambda: _of_kind("part"), LAYERS),
    "empty cell": (lambda: _of_kind("empty cell"), LAYERS),
    "tables": (lambda: [Layer("tables", table=_table(i)) for i in range(LAYERS)], 0),
    "literals in a checkpoint": (lambda: _of_kind("literals in a checkpoint"), 0),
    "policies": (lambda: [Layer("checkpoint" if i else "policy") for i in range(LAYERS)], 3),
    "constants": (lambda: [Layer(scale=1 / (i + 1)) for i in range(LAYERS)], 0),
    "buffers": (lambda: _of_kind("buffers"), 0),
    "writes": (lambda: _of_kind("writes"), 0),
    "literals": (lambda: _of_kind("literals"), 0),
    "inverse": (lambda: _of_kind("inverse"), 0 if HAVE_EFFECTS else LAYERS),
    "head": (lambda: [*_of_kind("inverse"), Layer("head")], 0 if HAVE_EFFECTS else LAYERS),
    "conjugate": (lambda: _of_kind("conjugate"), 0),
}
"""Layers of a model, and how many of them share a trace."""


def train(model: Model, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    losses = []
    for seed in range(2):
        torch.manual_seed(seed)
        # The second graph of "sizes" is for any number of rows.
        loss = run(torch.randn(6 if seed and model.layers[0].kind == "sizes" else 4, DIM))
        loss.backward()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("case", CASES)
@on_ranks(1)
def test_equal_layers_share_a_trace(case: str) -> None:
    torch.manual_seed(0)
    make, num_shared = CASES[case]
    model = Model(make())
    reference = copy.deepcopy(model)
    backend = graphshard.backend(init_device_mesh("cpu", (1,)), compiler="aot_eager")
    losses = train(model, torch.compile(model, backend=backend))
    found = re.findall(r"AOTAutograd traced (\d+) layers as one", backend.summary())
    assert sum(map(int, found)) == num_shared
    assert all(map(torch.equal, losses, train(reference, reference)))
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad.full_tensor(), theirs.grad)
    assert all(map(torch.equal, model.buffers(), reference.buffers()))


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@on_ranks(1)
def test_layers_are_inlined_if_no_joint_graph_is_traced(compiler: str) -> None:
    torch.manual_seed(0)
    model = Model(_of_kind("inverse"))
    backend = graphshard.backend(init_device_mesh("cpu", (1,)), compiler=compiler)
    # Unpatched, torch 2.13 detaches the results of layers with side effects.
    with (
        mock.patch.object(
            InvokeSubgraphCache, "add_effects", inspect.unwrap(InvokeSubgraphCache.add_effects)
        ),
        mock.patch("graphshard.pipeline.compile.forbid_effects"),
    ):
        train(model, torch.compile(model, backend=backend))
    assert all(parameter.grad is not None for parameter in model.parameters())
