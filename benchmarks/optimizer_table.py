"""Optimizers to try on sharded parameters, with the expected result of each.

An optimizer steps a sharded model and an unsharded copy with the same gradients, on two ranks with
unequal numbers of rows. Then model and optimizer are saved and loaded into another sharded model,
and both sharded models take one more step. ``tests/numerics/test_optimizer_table.py`` does this for
the optimizers of torch and transformers, ``benchmarks/optimizers.py`` for all.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import graphshard

SAME = "same bits"
STEPS = 3
NO_STRATEGY = "DTensor has no sharding strategy for this operator"
NORM = "divides in place by a norm that is not yet summed over ranks, which DTensor refuses"
FLATTENS = "flattens parameters to a vector, which DTensor refuses if rows are split unevenly"
MIXES = "creates plain tensors and mixes them with DTensors"
OTHERS_CODE = (
    "torch's cache returns the compiled step of a rank with more rows: works with "
    "TORCHINDUCTOR_AUTOGRAD_CACHE=0"
)
GPU = "runs only on GPUs; offload_policy also offloads optimizer state"


@dataclass(frozen=True)
class Case:
    """An optimizer, and its expected behavior on sharded parameters.

    Attributes:
        path: module and class.
        options: keyword arguments of the class.
        error: pattern of the error that it raises, or None if it works.
        why: reason for the result, and an alternative; shown in the table.
        tolerance: allowed relative difference from the unsharded copy, in the norm of a parameter.
        even: whether the ranks split all rows evenly.
        matrices: whether it only steps 2D parameters.
    """

    path: str
    options: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    why: str = ""
    tolerance: float = 0.0
    even: bool = False
    matrices: bool = False

    @property
    def package(self) -> str:
        return self.path.split(".")[0]

    @property
    def name(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        rows = ", even rows" if self.even else ""
        return f"{self.path.replace('.optimization', '')}({options}){rows}"

    def build(self, model: nn.Module) -> Any:
        module, _, kind = self.path.rpartition(".")
        params = [p for p in model.parameters() if p.ndim == 2 or not self.matrices]
        optimizer = getattr(importlib.import_module(module), kind)(params, **self.options)
        if hasattr(optimizer, "train"):  # schedule-free optimizers have two modes
            optimizer.train()
        return optimizer


def _each_way(*kinds: str) -> list[Case]:
    return [Case(f"torch.optim.{k}", {"foreach": f}) for k in kinds for f in (True, False)]


CASES = [
    *_each_way("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta"),
    *_each_way("RMSprop", "ASGD"),
    Case("torch.optim.SGD", {"lr": 0.01, "momentum": 0.9, "nesterov": True}),
    Case("torch.optim.AdamW", {"amsgrad": True}),
    Case("torch.optim.Adam", {"fused": True}),
    Case("torch.optim.AdamW", {"fused": True}),
    Case("torch.optim.SGD", {"fused": True}, "_fused_sgd_", NO_STRATEGY),
    Case("torch.optim.Adagrad", {"fused": True}, "_fused_adagrad_", NO_STRATEGY),
    Case("graphshard.optim.Muon", matrices=True, why="two all-to-alls per bucket, in bfloat16"),
    Case(
        "torch.optim.Muon",
        matrices=True,
        tolerance=1e-2,
        why="sums the norms of all ranks in bfloat16, and orthogonalizes all matrices on each "
        "rank: use graphshard.optim.Muon",
    ),
    Case("torch.optim.Adafactor", {"foreach": False}, "_NormPartial", NORM),
    # Two patterns, because torch 2.11 raises earlier.
    Case("torch.optim.Adafactor", {"foreach": True}, "_NormPartial|_foreach_lerp_", NORM),
    Case("transformers.optimization.Adafactor", {}, "mixed torch.Tensor and DTensor", MIXES),
    Case("torch.optim.Rprop", {"foreach": True}, "_foreach_copy_", NO_STRATEGY),
    Case("torch.optim.Rprop", {"foreach": False}, "index_put_", "writes in place through a mask"),
    Case("torch.optim.LBFGS", {"max_iter": 3}, "unevenly sharded", FLATTENS),
    Case("torch.optim.SparseAdam", {}, "dense gradients", "supports only sparse gradients"),
    Case("torchao.optim.AdamW8bit", {}, "", OTHERS_CODE),
    Case("torchao.optim.AdamW4bit", {}, "", OTHERS_CODE),
    Case("torchao.optim.CPUOffloadOptimizer", {"optimizer_class": torch.optim.AdamW}, "CUDA", GPU),
    Case("schedulefree.AdamWScheduleFree"),
    Case("schedulefree.SGDScheduleFree"),
    Case("pytorch_optimizer.Lion"),
    Case("pytorch_optimizer.Tiger"),
    Case("pytorch_optimizer.Shampoo", {}, "mixed torch.Tensor and DTensor", MIXES),
    Case("pytorch_optimizer.ScalableShampoo", {}, "mixed torch.Tensor and DTensor", MIXES),
    Case("pytorch_optimizer.SOAP", {}, "mixed torch.Tensor and DTensor", MIXES),
    Case("pytorch_optimizer.Adan", {}, "_foreach_copy_", NO_STRATEGY),
    Case("pytorch_optimizer.LARS", {}, "_foreach_copy_", NO_STRATEGY),
    Case("pytorch_optimizer.Lamb", {}, "_NormPartial", NORM),
    Case("pytorch_optimizer.CAME", {}, "_NormPartial", NORM),
    Case("pytorch_optimizer.Prodigy", {}, "unevenly sharded", FLATTENS),
    Case("pytorch_optimizer.Kron", {}, "unevenly sharded", FLATTENS),
]
"""All optimizers, in the order of the table."""


class Model(nn.Module):
    def __init__(self, even: bool) -> None:
        super().__init__()
        rows = (132, 128, 256) if even else (131, 128, 257)
        self.layers = nn.ModuleList(nn.Linear(64, n, bias=n != 128) for n in rows)


@dataclass(frozen=True)
class Outcome:
    """Observed behavior of an optimizer.

    Attributes:
        error: first line of the error that it raised, if any.
        difference: largest relative difference of any parameter from the unsharded copy.
        state: result of loading its saved state: ``SAME``, "differs", or an error.
    """

    error: str | None = None
    difference: float = 0.0
    state: str = ""


def try_out(case: Case) -> Outcome:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Model(case.even)
    models = graphshard.shard(copy.deepcopy(model), mesh), model
    try:
        optimizers = [case.build(each) for each in models]
        for step in range(STEPS):
            _step(models, optimizers, step)
    except Exception as error:
        return Outcome(_first_line(error))
    pairs = zip(*(each.parameters() for each in models))
    return Outcome(
        None, max(_difference(*pair) for pair in pairs), _resume(case, models[0], optimizers[0])
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _step(models: Sequence[nn.Module], optimizers: Sequence[Any], step: int) -> None:
    rng = torch.Generator().manual_seed(step)
    for of_all in zip(*(each.parameters() for each in models)):
        full = torch.randn(of_all[0].shape, generator=rng)
        for param in of_all:
            param.grad = full.clone()
            if isinstance(param, DTensor):
                param.grad = distribute_tensor(full, param.device_mesh, param.placements)
    for model, optimizer in zip(models, optimizers):
        optimizer.step(_closure(model) if isinstance(optimizer, torch.optim.LBFGS) else None)


def _closure(model: nn.Module) -> Callable[[], Tensor]:
    """Return a closure that sets the gradients of half the sum of all squared parameters."""

    def closure() -> Tensor:
        for param in model.parameters():
            param.grad = param.detach().clone()
        return torch.tensor(1.0)

    return closure


def _difference(ours: Tensor, theirs: Tensor) -> float:
    full = ours.full_tensor() if isinstance(ours, DTensor) else ours
    return float((full - theirs).norm() / theirs.norm())


def _resume(case: Case, model: nn.Module, optimizer: Any) -> str:
    """Save, load into another sharded model, step both; return ``SAME``, "differs" or an error."""
    try:
        full, state = graphshard.full_state_dict(model, optimizer)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        again = graphshard.shard(Model(case.even), mesh)
        resumed = case.build(again)
        graphshard.load_full_state_dict(again, full, resumed, state)
        _step((model, again), (optimizer, resumed), STEPS)
    except Exception as error:
        return _first_line(error)
    pairs = zip(model.parameters(), again.parameters())
    same = all(torch.equal(_local(ours), _local(theirs)) for ours, theirs in pairs)
    return SAME if same else "differs"


def _local(param: Tensor) -> Tensor:
    return param.to_local() if isinstance(param, DTensor) else param
