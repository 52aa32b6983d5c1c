"""Training steps of six small models on CPU ranks, measured for ``forecast_cpu``.

A step takes about 0.1 to 0.3 seconds on one CPU core.

Peak memory is the memory of model, optimizer and batch between two steps, plus the largest
additional memory that the profiler sees in a step. Memory that libraries allocate from the system
directly (oneDNN's scratch space, gloo's buffers) is excluded, as it would be on CUDA.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import graphshard
from benchmarks import common
from benchmarks.links import Wire, modelled_group
from benchmarks.llama import Llama, LlamaSizes
from benchmarks.models import GPT
from graphshard.forecast.recipe import Recipe
from graphshard.params.memory_report import memory_report
from graphshard.scripts import Inputs, call_model, loss_of

WARM_UP = 3
VOCAB, LENGTH = 2048, 256


@dataclass(frozen=True)
class Job:
    """Training runs of one model that are measured together, step by step in turns.

    Attributes:
        model: key of ``MODELS``.
        recipes: recipe of each run, with the path of its ``hardware`` file (``SchedulePolicy``).
        num_ranks: number of ranks of each run.
        wire: modelled wire, on which only the first rank exists (default: real gloo ranks).
        steps: number of measured steps of each run.
    """

    model: str
    recipes: tuple[tuple[Recipe, str], ...]
    num_ranks: int
    wire: Wire | None
    steps: int


@dataclass(frozen=True)
class Measured:
    """Measurements of a training run on one rank.

    Attributes:
        step_s: median time of a step.
        optimizer_s: median time of the optimizer in a step.
        processor_s: median CPU time of this process in a step, over all its threads.
        peak_bytes: largest number of bytes allocated at once.
        others: load from other processes during the measurement, as a fraction of one core.
    """

    step_s: float
    optimizer_s: float
    processor_s: float
    peak_bytes: int
    others: float


class Step(NamedTuple):
    step_s: float
    optimizer_s: float
    processor_s: float


def measure(job: Job) -> list[Measured]:
    torch.set_num_threads(1)
    trainings = [_Training(job, recipe, file) for recipe, file in job.recipes]
    runs = {str(i): training.step for i, training in enumerate(trainings)}
    busy_before, own_before, start = _busy_s(), time.process_time(), time.perf_counter()
    times = common.interleave(runs, job.steps, WARM_UP)
    elapsed_s = time.perf_counter() - start
    own_s = (time.process_time() - own_before) * (1 if job.wire else job.num_ranks)
    others = max(0.0, _busy_s() - busy_before - own_s) / elapsed_s
    return [
        Measured(
            **{
                name: statistics.median(getattr(step, name) for step in times[str(i)])
                for name in Step._fields
            },
            peak_bytes=training.peak_bytes(),
            others=others,
        )
        for i, training in enumerate(trainings)
    ]


def measure_with_wire(job: Job) -> list[Measured]:
    """Return the measurements of the first rank; no process group may exist yet."""
    assert job.wire is not None
    with modelled_group(job.wire, job.num_ranks, torch.device("cpu")):
        return measure(job)


class _Training:
    def __init__(self, job: Job, recipe: Recipe, hardware_file: str) -> None:
        torch.manual_seed(0)
        model, self._inputs = MODELS[job.model]()
        self._model = model.train()
        schedule = graphshard.SchedulePolicy(hardware=hardware_file)
        backend = graphshard.backend(
            _mesh(recipe, job.num_ranks), schedule=schedule, **recipe.options()
        )
        self._compiled = torch.compile(self._model, backend=backend, dynamic=False)
        self._run()  # shards the parameters, before the optimizer takes them
        self._optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        self.step()

    def _run(self) -> None:
        loss_of(call_model(self._compiled, self._inputs)).backward()

    def step(self) -> Step:
        dist.barrier()
        processor, start = time.process_time(), time.perf_counter()
        self._run()
        middle = time.perf_counter()
        self._optimizer.step()
        self._optimizer.zero_grad()
        end = time.perf_counter()
        return Step(end - start, end - middle, time.process_time() - processor)

    def peak_bytes(self) -> int:
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile:
            self.step()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            profile.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        allocations = [event for event in events if event.get("name") == "[memory]"]
        allocations.sort(key=lambda event: event["ts"])
        alive = itertools.accumulate(event["args"]["Bytes"] for event in allocations)
        return self._held_bytes() + max(0, *alive)

    def _held_bytes(self) -> int:
        report = memory_report(self._model, self._optimizer)
        inputs = self._inputs
        values = inputs.values() if isinstance(inputs, Mapping) else inputs
        batch = {id(value): value.nbytes for value in values}
        held = (report.parameters, report.buffers, report.optimizer)
        return sum(part.rank for part in held) + sum(batch.values())


@functools.cache
def _mesh(recipe: Recipe, num_ranks: int) -> DeviceMesh:
    names, shape = zip(*recipe.ranks(num_ranks).axes.items())
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _busy_s() -> float:
    """Return the busy seconds of all cores together since the machine booted."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    idle = int(fields[3]) + int(fields[4])
    return (sum(map(int, fields[:8])) - idle) / os.sysconf("SC_CLK_TCK")


# --- models --------------------------------------------------------------------------------------


class Made(NamedTuple):
    """A model, and the positional or keyword arguments of one step on one rank."""

    model: nn.Module
    inputs: Inputs


def _ids(length: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (1, length))


def gpt() -> Made:
    device = torch.device("cpu")
    sizes = {"dim": 384, "layers": 6, "head_dim": 64}
    model = GPT.seeded(device, **sizes, vocab=VOCAB, context=LENGTH)
    return Made(model, (model.batch(1, device),))


def llama() -> Made:
    ids = _ids(LENGTH)
    sizes = LlamaSizes(384, 6, 6, 2, 1024, recompute=False, vocab=VOCAB)
    return Made(Llama(sizes), (ids, ids))


def vit() -> Made:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=6,
        intermediate_size=1536,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        image_size=224,
        patch_size=16,
        num_labels=100,
        problem_type="single_label_classification",
    )
    return Made(transformers.ViTForImageClassification(config), _images(1, 224))


def convnet() -> Made:
    import transformers

    config = transformers.ResNetConfig(
        embedding_size=32,
        hidden_sizes=[64, 128, 256, 512],
        depths=[2, 2, 2, 2],
        layer_type="basic",
        num_labels=100,
        problem_type="single_label_classification",
    )
    return Made(transformers.ResNetForImageClassification(config), _images(4, 96))


def _images(rows: int, size: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(rows, 3, size, size), "labels": torch.arange(rows)}


def t5() -> Made:
    import transformers

    config = transformers.T5Config(
        vocab_size=VOCAB,
        d_model=320,
        d_kv=64,
        d_ff=1280,
        num_layers=4,
        num_heads=5,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    ids = {"input_ids": _ids(LENGTH), "labels": _ids(LENGTH // 2)}
    return Made(transformers.T5ForConditionalGeneration(config), ids)


def moe() -> Made:
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    ids = _ids(LENGTH)
    return Made(transformers.MixtralForCausalLM(config), {"input_ids": ids, "labels": ids})


MODELS: dict[str, Callable[[], Made]] = {
    "GPT": gpt,
    "Llama": llama,
    "ViT": vit,
    "convnet": convnet,
    "T5": t5,
    "MoE": moe,
}
