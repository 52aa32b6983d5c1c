"""Training recipes: strategy, precision, optimizer, and the code that sets them up."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from ..fake_mesh import Ranks
from ..options.float8_policy import Float8Policy
from ..options.schedule_policy import SchedulePolicy
from ..planning.memory_budget import Reduce

STRATEGIES = (
    "zero3, zero2, hsdp:N (shards over N ranks), hpz:N (backward gathers from N ranks) or ddp"
)
DTYPES = ("float32", "bf16", "fp8")


@dataclass(frozen=True)
class Optimizer:
    """A fused optimizer of ``torch.optim``."""

    states: int  # number of states for each parameter, each as large as the parameter
    code: str  # Python expression that constructs the optimizer


OPTIMIZERS = {
    "adamw": Optimizer(2, "torch.optim.AdamW(model.parameters(), fused=True)"),
    "adam": Optimizer(2, "torch.optim.Adam(model.parameters(), fused=True)"),
    "momentum": Optimizer(
        1, "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)"
    ),
    "sgd": Optimizer(0, "torch.optim.SGD(model.parameters(), lr=0.1, fused=True)"),
}


@dataclass(frozen=True)
class Recipe:
    """The settings of a training run: arguments of ``graphshard.plan``.

    Raises:
        ValueError: a value is invalid, or two values are incompatible.
    """

    strategy: str = "zero3"
    dtype: str = "bf16"
    optimizer: str = "adamw"
    recompute: float = 0.0
    accumulate: int = 1
    budget_gb: float | None = None
    offload: bool = False
    tp: int = 1
    reduce: Reduce = "ring"
    ep: int = 1

    def __post_init__(self) -> None:
        if not re.fullmatch(r"zero3|zero2|ddp|(hsdp|hpz):[1-9]\d*", self.strategy):
            raise ValueError(f"strategy={self.strategy!r}: must be {STRATEGIES}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r}: must be one of {DTYPES}")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer={self.optimizer!r}: must be one of {list(OPTIMIZERS)}")
        if self.reduce not in get_args(Reduce):
            raise ValueError(f"reduce={self.reduce!r}: must be one of {get_args(Reduce)}")
        for name in ("accumulate", "tp", "ep"):
            value = getattr(self, name)
            if not (isinstance(value, int) and value > 0):
                raise ValueError(f"{name}={value!r}: must be a positive integer")
        if not (isinstance(self.recompute, (int, float)) and 0 <= self.recompute <= 1):
            raise ValueError(
                f"recompute={self.recompute!r}: must be a number from 0 (recompute no layer in "
                "backward) to 1 (recompute all)"
            )
        if self.budget_gb is not None and not 0 < self.budget_gb < math.inf:
            raise ValueError(
                f"budget_gb={self.budget_gb!r}: must be a positive number of GB, or None"
            )
        if self.offload and self.kind == "ddp":
            raise ValueError(
                'offload with strategy="ddp": replicated parameters stay on the GPU; use a '
                "strategy that shards, such as zero3"
            )
        if self.ep > 1 and self.tp > 1:
            raise ValueError(f"ep={self.ep} with tp={self.tp}: set only one of the two")
        if self.ep > 1 and self.strategy not in ("zero3", "zero2"):
            raise ValueError(f"ep={self.ep} with strategy={self.strategy!r}: use zero3 or zero2")
        if self.dtype == "fp8":
            self._check_fp8()

    def _check_fp8(self) -> None:
        obstacles = {
            'strategy="ddp"': self.kind == "ddp" and "replicated parameters cannot use fp8",
            "offload": self.offload and "the host's time to compute fp8 scales is unknown",
            f"tp={self.tp}": self.tp > 1 and "split parameters cannot use fp8",
            f"ep={self.ep}": self.ep > 1 and "split parameters cannot use fp8",
        }
        for setting, obstacle in obstacles.items():
            if obstacle:
                raise ValueError(f'{setting} with dtype="fp8": {obstacle}; use bf16 or float32')

    @property
    def kind(self) -> str:
        return self.strategy.partition(":")[0]  # "hsdp" for "hsdp:8"

    @property
    def num_ranks(self) -> int:
        return int(self.strategy.partition(":")[2] or 0)  # 8 for "hsdp:8"

    def ranks(self, num_gpus: int) -> Ranks:
        """Return the shape of the mesh over ``num_gpus`` ranks.

        Raises:
            ValueError: ``ep``, ``tp``, or ``tp`` times the strategy's N does not divide
                ``num_gpus``.
        """
        for name, size in (("tp", self.tp), ("ep", self.ep)):
            if num_gpus % size:
                raise ValueError(f"{name}={size}: must divide the number of GPUs, {num_gpus}")
        num_groups = num_gpus // self.tp
        if num_groups % max(self.num_ranks, 1):
            counted = f"groups of {self.tp} GPUs" if self.tp > 1 else "GPUs"
            raise ValueError(
                f"strategy={self.strategy!r}: {self.num_ranks} must divide the number of "
                f"{counted}, {num_groups}"
            )
        if self.kind == "hsdp":
            return Ranks(num_groups // self.num_ranks, self.num_ranks, self.tp)
        return Ranks(1, num_groups, self.tp, self.ep)

    def _arguments(self) -> Iterator[tuple[str, object, str]]:
        """Yield arguments of ``graphshard.backend``: name, value, and Python code of the value."""
        if self.kind == "zero2":
            yield "reshard_after_forward", False, "False"
        if self.kind == "hpz":
            yield "reshard_after_forward", self.num_ranks, str(self.num_ranks)
        if self.kind == "ddp":
            yield "overrides", {"*": {"shard": False}}, '{"*": {"shard": False}}'
        if self.dtype != "float32":
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            yield "mp_policy", policy, "MixedPrecisionPolicy(torch.bfloat16, torch.float32)"
        if self.dtype == "fp8":
            yield "fp8", Float8Policy(), "graphshard.Float8Policy()"
        if self.offload:
            yield "offload_policy", CPUOffloadPolicy(), "CPUOffloadPolicy()"

    def options(self) -> dict[str, Any]:
        # The arguments of ``graphshard.backend``, except mesh and schedule.
        return {name: value for name, value, _ in self._arguments()}

    def traced_options(self) -> dict[str, Any]:
        # A trace needs no schedule.
        options = {**self.options(), "schedule": SchedulePolicy(overlap=False)}
        if self.kind == "zero2":  # traced as ZeRO-3: ``plan_step`` removes the gathers of backward
            del options["reshard_after_forward"]
        return options

    def code(
        self,
        num_gpus: int,
        memory_budget_gb: float | None = None,
        device_type: str = "cuda",
        recomputed: Sequence[str] = (),
    ) -> str:
        """Return Python code, with its imports, that sets up training of ``model``.

        Args:
            memory_budget_gb: memory budget of a graph, if any.
            recomputed: result of ``workload.recomputed_layers``, for partial recomputation.
        """
        axes = self.ranks(num_gpus).axes
        quoted = {name: f'"{name}"' for name in axes}
        names = f", mesh_dim_names=({', '.join(quoted.values())})" if len(axes) > 1 else ""
        data_axes = ", ".join(text for name, text in quoted.items() if name != "tp")
        mesh = f"mesh[{data_axes}]" if self.tp > 1 else "mesh"
        if self.ep > 1:
            mesh = "data_mesh(mesh), overrides=overrides(model, mesh)"
        arguments = [mesh, *(f"{name}={code}" for name, _, code in self._arguments())]
        schedule = []
        if memory_budget_gb is not None:
            budget = math.floor(memory_budget_gb * 1e3) / 1e3  # whole MB
            schedule.append(f"memory_budget_gb={budget:g}")
        if self.reduce != "ring":
            schedule.append(f'reduce="{self.reduce}"')
        if schedule:
            arguments.append(f"schedule=graphshard.SchedulePolicy({', '.join(schedule)})")
        lines = ["", f'mesh = init_device_mesh("{device_type}", {tuple(axes.values())}{names})']
        if self.recompute == 1:
            lines.append("model.gradient_checkpointing_enable()  # or checkpoint() of each layer")
        for layers in recomputed if self.recompute < 1 else ():
            recomputing = "functools.partial(checkpoint, layer.forward, use_reentrant=False)"
            lines += [f"for layer in {layers}:", f"    layer.forward = {recomputing}"]
        if self.tp > 1:
            lines.append('parallelize(model, mesh["tp"])  # or your own function')
        if self.ep > 1:
            lines.append("torch._dynamo.config.capture_scalar_outputs = True")
            lines.append('parallelize(model, mesh["ep"])')
        lines.append(
            f"model = torch.compile(model, backend=graphshard.backend({', '.join(arguments)}))"
        )
        lines.append(f"optimizer = {OPTIMIZERS[self.optimizer].code}")
        return "\n".join([*_imports("\n".join(lines)), *lines])


def _imports(code: str) -> Iterator[str]:
    if "functools." in code:
        yield "import functools"
        yield ""
    yield "import torch"
    yield "from torch.distributed.device_mesh import init_device_mesh"
    policies = [name for name in ("CPUOffloadPolicy", "MixedPrecisionPolicy") if name in code]
    if policies:
        yield f"from torch.distributed.fsdp import {', '.join(policies)}"
    if "(checkpoint," in code:
        yield "from torch.utils.checkpoint import checkpoint"
    yield ""
    yield "import graphshard"
    if "data_mesh(" in code:
        yield "from graphshard.expert_parallel import data_mesh, overrides, parallelize"
    elif "parallelize(" in code:
        yield "from graphshard.tensor_parallel import parallelize"
