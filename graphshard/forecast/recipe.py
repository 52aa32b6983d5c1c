"""How a model is to be trained: strategy, precision, optimizer, and the code that says so."""

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
    """An optimizer of ``torch.optim``, fused.

    Attributes:
        states: numbers that it keeps for each parameter.
        passes: how often it reads or writes one number for each parameter in a step.
        code: that makes it.
    """

    states: int
    passes: int
    code: str


# Parameter, gradient and each state are read, and all but the gradient are written.
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
    """How a model is trained.

    Attributes:
        strategy: one of ``STRATEGIES``.
        dtype: float32; bf16: gathered and computed in bfloat16, gradients reduced in float32; fp8:
            as bf16, but inner linears compute in fp8 and are gathered in it.
        optimizer: one of ``OPTIMIZERS``; fused.
        recompute: the part of the layers, from 0 to 1, that backward recomputes from their inputs:
            the first ones, since backward needs them when it has freed the others.
        accumulate: microbatches in a step, each of which reduces its gradients.
        budget_gb: memory that the schedule may use on a device; None: as much as it likes.
        offload: whether the host keeps shards, gradients and optimizer, and runs that.

    Raises:
        ValueError: a value is not one of these.
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
        """
        Raises:
            ValueError: the strategy or the precision cannot be with the host.
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
        """The strategy without its number of ranks."""
        return self.strategy.partition(":")[0]

    @property
    def num_ranks(self) -> int:
        """The number of ranks that the strategy names; 0 where it names none."""
        return int(self.strategy.partition(":")[2] or 0)

    def ranks(self, num_gpus: int) -> Ranks:
        """Return the mesh over so many ranks.

        Raises:
            ValueError: the mesh cannot have the strategy.
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
        """Return the arguments of ``graphshard.backend`` but for mesh and schedule."""
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
        """Return the arguments with which a step is traced: nothing is scheduled yet."""
        return {**self.options(), "schedule": SchedulePolicy(overlap=False)}

    def code(
        self,
        num_gpus: int,
        memory_budget_gb: float | None = None,
        device_type: str = "cuda",
        recomputed: Sequence[str] = (),
    ) -> str:
        """Return the lines of Python that train so.

        Args:
            memory_budget_gb: of a graph; None: none.
            recomputed: lists of layers, as of ``workload.recomputed_layers``; where ``recompute``
                is neither 0 nor 1.
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
        """Return the lines that have layers recomputed."""
        if self.recompute == 1:
            return ["model.gradient_checkpointing_enable()  # or checkpoint() of each layer"]
        recomputing = "functools.partial(checkpoint, layer.forward, use_reentrant=False)"
        return [
            line
            for layers in recomputed
            for line in (f"for layer in {layers}:", f"    layer.forward = {recomputing}")
        ]
