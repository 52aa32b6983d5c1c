"""Test cases (models x strategies x ranks), run on a simulated GPU.

Functions that take a ``Recorder`` run in a process that simulates a GPU
(``graphshard.check.process``).
"""

from __future__ import annotations

import dataclasses
import functools
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import in_kernel_invocation_manager
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import graphshard
from benchmarks.llama import parallelize
from graphshard._torch.tensors import new_fake_mode
from graphshard.check.gpus import GPUS, CompiledKernel, compile_kernels, has_float8
from graphshard.check.recorder import Recorder
from graphshard.check.step import (
    Recording,
    Step,
    collect_recording,
    forward_backward,
    record_steps,
    train,
)
from graphshard.fake_mesh import Ranks
from graphshard.tensor_parallel import Parallelize
from tests.cuda import models
from tests.cuda.fsdp2 import record_fsdp2

DEVICE = "H100"
TARGETS = ("A100-80GB", "H100", "B200")
OF_FSDP2 = {"mp_policy", "offload_policy", "reshard_after_forward"}
"""Options that eager FSDP2 also has."""
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Strategy:
    """Options, mesh and step function to train a model with.

    Attributes:
        options: arguments of ``graphshard.backend``; ``mp_policy`` is bf16 by default, and the
            case sets hardware and memory budget of ``schedule``.
        replicas: number of replicas in the mesh.
        tp, ep: sizes of mesh axes; see ``Ranks``.
        parallelize: function that splits the model over the tp or ep axis; None for no split.
        change: function that modifies the blocks of a model in place; None for no change.
        step: function that runs one step.
        dynamic: argument of ``torch.compile``.
        dtype: dtype of the unsharded baseline, trained with plain ``torch.compile``; None if no
            baseline runs the same kernels.
    """

    options: dict[str, Any] = field(default_factory=dict)
    replicas: int = 1
    tp: int = 1
    ep: int = 1
    parallelize: Parallelize | None = None
    change: Callable[[nn.Module], None] | None = None
    step: Step = forward_backward
    dynamic: bool | None = None
    dtype: torch.dtype | None = torch.bfloat16


def _accumulates(model: nn.Module, compiled: Callable[..., Tensor], inputs: Any) -> None:
    with graphshard.no_sync(model):
        compiled(*inputs).backward()
    compiled(*inputs).backward()


def _autocasts(model: nn.Module, compiled: Callable[..., Tensor], inputs: Any) -> None:
    with torch.autocast("cuda", torch.bfloat16):
        loss = compiled(*inputs)
    loss.backward()


def _changes_sizes(model: nn.Module, compiled: Callable[..., Tensor], inputs: Any) -> None:
    compiled(*map(_half, inputs)).backward()
    compiled(*inputs).backward()


def _half(batch: Tensor) -> Tensor:
    is_text = batch.dtype == torch.int64
    return batch[:, : batch.shape[1] // 2] if is_text else batch[: len(batch) // 2]


OFFLOADED = "offloaded activations"
MXFP8 = "fp8 mxfp8"
STRATEGIES = {
    "ZeRO-3": Strategy(),
    "float32": Strategy({"mp_policy": MixedPrecisionPolicy()}, dtype=torch.float32),
    "ZeRO-2": Strategy({"reshard_after_forward": False}),
    "HSDP": Strategy(replicas=2),
    "hpZ": Strategy({"reshard_after_forward": 4}),
    "replicated": Strategy({"overrides": {"*": {"shard": False}}}),
    "autocast": Strategy(
        {"mp_policy": MixedPrecisionPolicy()}, step=_autocasts, dtype=torch.float32
    ),
    "fp8 tensorwise": Strategy({"fp8": graphshard.Float8Policy()}, dtype=None),
    "fp8 rowwise": Strategy({"fp8": graphshard.Float8Policy("rowwise")}, dtype=None),
    MXFP8: Strategy({"fp8": graphshard.Float8Policy("mxfp8")}, dtype=None),
    # No baseline: unsharded models do not sum received gradients.
    "exchange": Strategy({"schedule": graphshard.SchedulePolicy(reduce="exchange")}, dtype=None),
    "CPU offload": Strategy({"offload_policy": CPUOffloadPolicy()}),
    OFFLOADED: Strategy(),
    "no_sync": Strategy(step=_accumulates, dtype=None),
    "dynamic shapes": Strategy(step=_changes_sizes, dynamic=True),
    "LoRA": Strategy(change=models.add_lora),
    "checkpointing": Strategy(change=models.recompute_blocks),
    "TP=2": Strategy(tp=2, parallelize=parallelize, dtype=None),
    "EP=8": Strategy(ep=8, parallelize=models.split_experts, dtype=None),
}


BUDGET_GB = {"gpt": 1.2, "llama": 1.0, "convnet": 0.008, "wide_convnet": 0.016, "moe": 0.25}
"""Device memory budget of each model with offloaded activations."""


@dataclass(frozen=True)
class Case:
    model: str
    strategy: str
    world: int = 8
    rank: int = 0

    @property
    def budget_gb(self) -> float | None:
        return BUDGET_GB[self.model] if self.strategy == OFFLOADED else None

    @property
    def device(self) -> str:
        return "B200" if self.strategy == MXFP8 else DEVICE

    def __str__(self) -> str:
        return f"{self.model}, {self.strategy}, rank {self.rank} of {self.world}"


FEW = (0, 512, 1023)
NUM_CASES = 4  # cases per process, since starting a process takes seconds
ALL = [
    *(
        Case(model, name)
        for model in ("gpt", "llama")
        for name, strategy in STRATEGIES.items()
        if strategy.parallelize is None
    ),
    *(
        Case(model, name)
        for model in ("convnet", "moe")
        for name, strategy in STRATEGIES.items()
        if not (strategy.change or strategy.parallelize or "fp8" in strategy.options)
    ),
    *(
        Case(model, f"fp8 {recipe}")
        for model in ("llama_8b", "llama_70b")
        for recipe in ("tensorwise", "rowwise")
    ),
    *(Case("wide_convnet", strategy) for strategy in ("ZeRO-3", OFFLOADED)),
    *(Case("gpt", "ZeRO-3", rank=rank) for rank in (4, 7)),
    *(Case("gpt", name, 1024, rank) for name in ("ZeRO-3", "HSDP") for rank in FEW),
    *(Case(model, "ZeRO-3", 1024, rank) for model in ("llama", "convnet", "moe") for rank in FEW),
    *(
        Case(model, name, 1024, 1023)
        for model in ("llama", "convnet", "moe")
        for name in ("HSDP", "CPU offload")
    ),
    *(Case("gpt", name, 1024, 1023) for name in ("ZeRO-2", "hpZ", "CPU offload", "fp8 rowwise")),
    *(
        Case(model, name, world, world - 1)
        for model, name in (("llama", "TP=2"), ("routed", "EP=8"))
        for world in (8, 1024)
    ),
]
"""The convnet and the MoE skip strategies that modify blocks (they have none) and fp8 (their linear
layers, a head and routers, are too small)."""


@dataclass(frozen=True)
class Outcome:
    """The result of a case.

    Attributes:
        recording: recording of the step; None if it or a baseline raised.
        error: traceback; "" if nothing raised.
        unsharded: recording of the unsharded baseline; None if there is none.
        fsdp2: recording of eager FSDP2; None if it does not support the strategy.
        kernels: compiled kernels, keyed by GPU name; fp8 cases omit GPUs without fp8.
    """

    recording: Recording | None
    error: str = ""
    unsharded: Recording | None = None
    fsdp2: Recording | None = None
    kernels: dict[str, list[CompiledKernel]] = field(default_factory=dict)


def run(
    recorder: Recorder, cases: Sequence[Case], targets: Sequence[str] = TARGETS
) -> list[Outcome]:
    return [_run(recorder, case, targets) for case in cases]


def _make(model: str, change: Callable[[nn.Module], None] | None) -> models.Made:
    made: models.Made = getattr(models, model)()
    if change is not None:
        change(made[0])
    return made


@functools.cache  # strategies with equal arguments share a recording
def _record_unsharded(
    recorder: Recorder,
    model: str,
    change: Callable[[nn.Module], None] | None,
    dtype: torch.dtype,
    step: Step,
    dynamic: bool | None,
) -> Recording:
    recorder.clear()
    fake, before = new_fake_mode(), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with fake, torch.device("cuda:0"):
            made, inputs = _make(model, change)
    finally:
        torch.set_default_dtype(before)
    train(recorder, fake, made, torch.compile(made, dynamic=dynamic), inputs, step)
    return collect_recording(recorder)


@functools.cache  # cases share most of their kernels
def _compile(kernel: tuple[str, str], gpu: str) -> CompiledKernel:
    (compiled,) = compile_kernels([kernel], GPUS[gpu])
    return compiled


def _run(recorder: Recorder, case: Case, targets: Sequence[str]) -> Outcome:
    strategy = STRATEGIES[case.strategy]
    shards = case.world // strategy.replicas // strategy.tp
    ranks = Ranks(strategy.replicas, shards, strategy.tp, strategy.ep)
    options = {"mp_policy": BF16, **strategy.options}

    make_model = functools.partial(_make, case.model, strategy.change)
    step, dynamic, dtype = strategy.step, strategy.dynamic, strategy.dtype
    unsharded = fsdp2 = None
    try:
        if case.strategy != OFFLOADED and _is_of_fsdp2(strategy):
            fsdp2 = record_fsdp2(recorder, make_model, ranks, case.rank, options, step)
        options["schedule"] = dataclasses.replace(
            options.get("schedule", graphshard.SchedulePolicy()),
            hardware=DEVICE,
            memory_budget_gb=case.budget_gb,
        )
        recording = record_steps(
            recorder,
            make_model,
            ranks,
            options,
            rank=case.rank,
            step=step,
            dynamic=dynamic,
            parallelize=strategy.parallelize,
        )
        if dtype is not None:
            unsharded = _record_unsharded(
                recorder, case.model, strategy.change, dtype, step, dynamic
            )
    except Exception:
        return Outcome(None, traceback.format_exc())
    able = [name for name in targets if _may_run(options, name)]
    kernels = {name: [_compile(k, name) for k in set(recording.kernels)] for name in able}
    return Outcome(recording, unsharded=unsharded, fsdp2=fsdp2, kernels=kernels)


def _may_run(options: Mapping[str, Any], gpu: str) -> bool:
    return "fp8" not in options or has_float8(GPUS[gpu], options["fp8"].recipe_name)


def _is_of_fsdp2(strategy: Strategy) -> bool:
    """Return whether eager FSDP2 can run the strategy on fake tensors.

    With an integer ``reshard_after_forward``, or a mesh made for DTensors, FSDP2 reads tensor
    values, which fake tensors lack.
    """
    options, step = strategy.options, strategy.step
    has_number = type(options.get("reshard_after_forward")) is int
    reads_values = has_number or strategy.parallelize is not None
    return options.keys() <= OF_FSDP2 and not reads_values and step is not _accumulates


@dataclass(frozen=True)
class Planted:
    """Results of operators and of a kernel, with and without injected faults.

    Attributes:
        kernel_errors: errors of a kernel that is unchanged, has a misspelled call, or runs on a GPU
            without shared memory.
        product_errors: errors of four fp8 products. cuBLASLt accepts the first. The others have a
            row-major second matrix, an inner size that is not a multiple of 16, and a first
            matrix at an offset of 8 bytes.
        channels_last: whether the output of a convolution is channels-last, given contiguous images
            and weight, channels-last images, and a channels-last weight.
        devices: device types that a fake tensor reports in the thread that runs a kernel and in
            another thread.
    """

    kernel_errors: list[str]
    product_errors: list[str]
    channels_last: list[bool]
    devices: list[str]


def plant(recorder: Recorder, name: str, source: str) -> Planted:
    products = ((32, True, 0), (32, False, 0), (24, True, 0), (32, True, 8))
    errors = [_error_of_product(*product) for product in products]
    return Planted(_compile_planted(name, source), errors, _convolve(), _devices_within_kernel())


def _compile_planted(name: str, source: str) -> list[str]:
    gpu = GPUS[DEVICE]
    poor = dataclasses.replace(gpu, shared_memory_per_block_optin=-1)
    wrong = source.replace("tl.load(", "tl.lode(")
    tried = ((source, gpu), (wrong, gpu), (source, poor))
    return [compile_kernels([(name, text)], where)[0].error for text, where in tried]


def _convolve() -> list[bool]:
    last = torch.channels_last
    with new_fake_mode(), torch.device("cuda:0"):
        images, weight = torch.empty(2, 8, 4, 4), torch.empty(8, 8, 3, 3)
        results = [
            torch.conv2d(images, weight),
            torch.conv2d(images.to(memory_format=last), weight),
            torch.conv2d(images, weight.to(memory_format=last)),
        ]
    return [result.is_contiguous(memory_format=last) for result in results]


def _devices_within_kernel() -> list[str]:
    mode = new_fake_mode()
    with mode:
        tensor = torch.empty(1, device="cuda:0")
    with in_kernel_invocation_manager(mode), ThreadPoolExecutor() as pool:
        return [tensor.device.type, pool.submit(lambda: tensor.device.type).result()]


def _error_of_product(inner: int, turned: bool, offset: int) -> str:
    with new_fake_mode(), torch.device("cuda:0"):
        left = torch.empty(offset + 16 * inner).to(torch.float8_e4m3fn)[offset:].view(16, inner)
        right = torch.empty((16, inner) if turned else (inner, 16)).to(torch.float8_e4m3fn)
        one = torch.ones(())
        out = torch.empty(16, 16, dtype=torch.bfloat16)
        try:
            torch.ops.aten._scaled_mm.out(
                left, right.t() if turned else right, one, one, out_dtype=torch.bfloat16, out=out
            )
        except (RuntimeError, ValueError) as error:
            return str(error)
    return ""
