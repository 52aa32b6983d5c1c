"""How long does compiling a training step of Llama-3 8B take on the host of a GPU?

    python -m benchmarks.compile_time_gpu [--layers 8 32] [--gpu H100] [--variants ..] [--out FILE]

Needs no GPU: rank 0 of 8 takes its first step in a new process that simulates one
(``graphshard.check``), with one sequence of 8,192 tokens and bfloat16 reduced in float32. "first
step s" is the time of sharding, forward and backward, without Triton; torch's caches are off.
"kernels" counts distinct Triton kernels. "Triton s" is the time to compile them on one core, with
an empty cache. The parts are described in ``benchmarks/compile_time.py``.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from typing import Any, NamedTuple

import torch
from torch._dynamo.utils import compilation_time_metrics
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import graphshard
from benchmarks import common
from benchmarks.common import FSDP2_BLOCKS
from benchmarks.compile_time import REGIONS, WHOLE, Setting, parts_of, timed_parts
from benchmarks.llama import LLAMA3, TOKENS, WORLD, Llama
from benchmarks.variants import Trained, fsdp2_compiled_blocks
from graphshard._torch.tensors import new_fake_mode
from graphshard.check.gpus import GPUS, compile_kernels
from graphshard.check.process import call
from graphshard.check.recorder import Recorder
from graphshard.fake_mesh import Ranks, fake_mesh

VARIANTS = (FSDP2_BLOCKS, WHOLE, REGIONS)
POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class FirstStep(NamedTuple):
    """Seconds of a first step, of its parts and of Triton, and the number of Triton kernels."""

    seconds: float
    parts: dict[str, float]
    kernels: int
    triton_s: float


def main() -> None:
    parser = common.new_parser(__doc__)
    parser.add_argument("--layers", nargs="+", type=common.count, default=[8, 32], metavar="N")
    parser.add_argument("--gpu", choices=GPUS, default="H100", help="default: %(default)s")
    common.add_variants(parser, VARIANTS)
    common.add_out(parser)
    args = parser.parse_args()
    paragraphs = [common.heading("benchmarks.compile_time_gpu", torch.device("cpu"))]
    common.show(*paragraphs)
    for layers in args.layers:
        rows = [_row(variant, _first_step(variant, layers, args.gpu)) for variant in args.variants]
        paragraphs += [f"## {layers} layers, {args.gpu}", common.table(rows)]
        common.show(*paragraphs[-2:])
        common.write_report(args.out, paragraphs)


def _first_step(variant: str, layers: int, gpu: str) -> FirstStep:
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        step: FirstStep = call("benchmarks.compile_time_gpu:measure", gpu, variant, layers, gpu)
    return step


def _row(variant: str, step: FirstStep) -> dict[str, str]:
    parts = {name: f"{seconds:.1f}" for name, seconds in step.parts.items()}
    return {
        "variant": variant,
        "first step s": f"{step.seconds:.1f}",
        **parts,
        "kernels": str(step.kernels),
        "Triton s": f"{step.triton_s:.1f}",
    }


# --- in the process that simulates a GPU ---------------------------------------------------------


def measure(recorder: Recorder, variant: str, layers: int, gpu: str) -> FirstStep:
    """Measure the first step of a variant."""
    with fake_mesh(Ranks(1, WORLD), "cuda", 0) as mesh:
        fake = new_fake_mode()
        with fake, torch.device("cuda:0"):
            model = Llama(dataclasses.replace(LLAMA3["8B"], layers=layers))
            ids = torch.zeros(1, TOKENS, dtype=torch.int64)
        compilation_time_metrics.clear()
        with timed_parts() as ours:
            start = time.perf_counter()
            if variant == FSDP2_BLOCKS:
                with fake:
                    compiled = fsdp2_compiled_blocks(model, mesh, mp_policy=POLICY)
            else:
                compiled = _graphshard(model, mesh, gpu, variant)
            with fake:
                compiled(ids, ids).backward()
            seconds = time.perf_counter() - start
    setting = Setting(variant, layers, LLAMA3["8B"].dim, WORLD, "cuda")
    parts = parts_of(seconds, ours, setting)
    start = time.perf_counter()
    kernels = compile_kernels(recorder.kernels, GPUS[gpu])
    return FirstStep(seconds, parts, len(kernels), time.perf_counter() - start)


def _graphshard(model: Llama, mesh: DeviceMesh, gpu: str, variant: str) -> Trained:
    schedule = graphshard.SchedulePolicy(hardware=gpu, regions=variant == REGIONS)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": POLICY, "schedule": schedule}
    options["sync_module_states"] = False  # FSDP2 does not broadcast either
    # Outside of the fake mode: ranks exchange parameter names in real tensors.
    graphshard.shard(model, **options)
    return torch.compile(model, backend=graphshard.backend(**options))


if __name__ == "__main__":
    main()
