"""Training recipes: strategy, precision, optimizer, and the code that sets them up."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from ..options.float8_policy import Float8Policy
from ..options.schedule_policy import SchedulePolicy
from .trace import Ranks

STRATEGIES = "zero3, zero2, hsdp:N (shards over N ranks), hpz:N (backward gathers from N) or ddp"
DTYPES = ("float32", "bf16", "fp8")


@dataclass(frozen=True)
class Optimizer:
    """A fused optimizer of ``torch.optim``.

    Attributes:
        states: number of states for each parameter, each as large as the parameter.
        passes: number of reads and writes per parameter element in a step.
        code: Python expression that constructs it.
    """

    states: int
    passes: int
    code: str


# Passes: read the parameter, the gradient and each state; write all but the gradient.
OPTIMIZERS = {
    "adamw": Optimizer(2, 7, "torch.optim.AdamW(model.parameters(), fused=True)"),
    "adam": Optimizer(2, 7, "torch.optim.Adam(model.parameters(), fused=True)"),
    "momentum": Optimizer(
        1, 5, "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)"
    ),
    "sgd": Optimizer(0, 3, "torch.optim.SGD(model.parameters(), lr=0.1, fused=True)"),
}


@dataclass(frozen=True)
class Recipe:
    """The settings of a training run.

    Attributes:
        strategy: one of ``STRATEGIES``.
        dtype: "float32"; "bf16": parameters gathered and used in bfloat16, gradients reduced in
            float32; "fp8": as "bf16", with inner linears gathered and computed in fp8.
        optimizer: key of ``OPTIMIZERS``.
        recompute: fraction of the layers, from 0 to 1, that backward recomputes from their inputs.
            These are the first layers: backward reaches them last, when it has freed the
            activations of the others.
        accumulate: number of microbatches in a step; each reduces its gradients.
        budget_gb: memory of a device that the schedule may use, in GB; None: no limit.
        offload: whether the host keeps shards, gradients and optimizer state, and runs the
            optimizer.

    Raises:
        ValueError: a value is invalid, or two values exclude each other.
    """

    strategy: str = "zero3"
    dtype: str = "bf16"
    optimizer: str = "adamw"
    recompute: float = False
    accumulate: int = 1
    budget_gb: float | None = None
    offload: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"zero3|zero2|ddp|(hsdp|hpz):[1-9]\d*", self.strategy):
            raise ValueError(f"strategy={self.strategy!r}: must be {STRATEGIES}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r}: must be one of {DTYPES}")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer={self.optimizer!r}: must be one of {list(OPTIMIZERS)}")
        if self.strategy == "ddp" and self.dtype == "fp8":
            raise ValueError(
                'dtype="fp8" with ddp: replicated parameters stay out of fp8; use bf16'
            )
        if not (isinstance(self.accumulate, int) and self.accumulate > 0):
            raise ValueError(f"accumulate={self.accumulate!r}: must be a whole number from 1 up")
        if not (isinstance(self.recompute, (int, float)) and 0 <= self.recompute <= 1):
            raise ValueError(
                f"recompute={self.recompute!r}: must be a number from 0 (no layer is recomputed in "
                "backward) to 1 (all are)"
            )
        self._check_offload()

    def _check_offload(self) -> None:
        """Check that ``offload`` works with the strategy and the dtype.

        Raises:
            ValueError: it does not.
        """
        if not self.offload:
            return
        if self.kind == "ddp":
            raise ValueError(
                "offload with ddp: replicated parameters stay on the GPU; use zero3, or hsdp:N"
            )
        if self.dtype == "fp8":
            raise ValueError(
                'offload with dtype="fp8": how long the host takes to find the scales of its '
                "shards is not known; use bf16"
            )

    @property
    def kind(self) -> str:
        """Name of the strategy, without its number of ranks."""
        return self.strategy.partition(":")[0]

    @property
    def num_ranks(self) -> int:
        """Number of ranks in the strategy; 0 if it has none."""
        return int(self.strategy.partition(":")[2] or 0)

    def ranks(self, num_gpus: int) -> Ranks:
        """Return the mesh over ``num_gpus`` ranks.

        Raises:
            ValueError: the strategy's number of ranks does not divide ``num_gpus``.
        """
        if num_gpus % max(self.num_ranks, 1):
            raise ValueError(
                f"strategy={self.strategy!r}: {self.num_ranks} does not divide {num_gpus} GPUs; "
                "name a number of ranks that does"
            )
        if self.kind == "hsdp":
            return Ranks(num_gpus // self.num_ranks, self.num_ranks)
        return Ranks(1, num_gpus)

    def options(self) -> dict[str, Any]:
        """Return the arguments of ``graphshard.backend``, except mesh and schedule."""
        options: dict[str, Any] = {"reshard_after_forward": True}
        if self.kind == "zero2":
            options["reshard_after_forward"] = False
        if self.kind == "hpz":
            options["reshard_after_forward"] = self.num_ranks
        if self.kind == "ddp":
            options["overrides"] = {"*": {"shard": False}}
        if self.dtype != "float32":
            options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        if self.dtype == "fp8":
            options["fp8"] = Float8Policy()
        if self.offload:
            options["offload_policy"] = CPUOffloadPolicy()
        return options

    def traced_options(self) -> dict[str, Any]:
        """Return the arguments for tracing a step, which schedules nothing."""
        return {**self.options(), "schedule": SchedulePolicy(overlap=False)}

    def code(
        self,
        num_gpus: int,
        memory_budget_gb: float | None = None,
        device_type: str = "cuda",
        recomputed: Sequence[str] = (),
    ) -> str:
        """Return the Python code that trains by this recipe.

        Args:
            memory_budget_gb: memory budget of a graph; None: no budget.
            recomputed: slices of layers from ``workload.recomputed_layers``; only for a
                ``recompute`` strictly between 0 and 1.
        """
        replicas, shards = self.ranks(num_gpus)
        is_2d = replicas > 1
        mesh = f"{(replicas, shards)}" if is_2d else f"({shards},)"
        names = ', mesh_dim_names=("replicate", "shard")' if is_2d else ""
        arguments = ["mesh"]
        arguments += {
            "zero2": ["reshard_after_forward=False"],
            "hpz": [f"reshard_after_forward={self.num_ranks}"],
            "ddp": ['overrides={"*": {"shard": False}}'],
        }.get(self.kind, [])
        if self.dtype != "float32":
            arguments.append("mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)")
        if self.dtype == "fp8":
            arguments.append("fp8=graphshard.Float8Policy()")
        if self.offload:
            arguments.append("offload_policy=CPUOffloadPolicy()")
        if memory_budget_gb is not None:
            arguments.append(
                f"schedule=graphshard.SchedulePolicy(memory_budget_gb={memory_budget_gb:.1f})"
            )
        lines = [f'mesh = init_device_mesh("{device_type}", {mesh}{names})']
        lines += self._recomputing(recomputed)
        lines.append(
            f"model = torch.compile(model, backend=graphshard.backend({', '.join(arguments)}))"
        )
        lines.append(f"optimizer = {OPTIMIZERS[self.optimizer].code}")
        return "\n".join(lines)

    def _recomputing(self, recomputed: Sequence[str]) -> list[str]:
        """Return the lines that enable recomputation."""
        if self.recompute == 1:
            return ["model.gradient_checkpointing_enable()  # or checkpoint() of each layer"]
        recomputing = "functools.partial(checkpoint, layer.forward, use_reentrant=False)"
        return [
            line
            for layers in recomputed
            for line in (f"for layer in {layers}:", f"    layer.forward = {recomputing}")
        ]
