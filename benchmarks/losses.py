"""How do lower precisions of linears and reductions change the loss, and what do they save?

    python -m benchmarks.losses [--runs "fp8, rowwise" ...] [--steps 300] [--ranks 4]

The demo's GPT learns the demo's text on the CPU: under FSDP2 in bfloat16, which reduces gradients
in float32; and under graphshard in float32, in bfloat16 with ``SchedulePolicy(reduce="ring")`` and
``"exchange"``, which sends gradients in bfloat16 and sums them in float32, and with fp8 linears.
gloo always exchanges, so the ranks use the tests' process group over it, for which graphshard also
plans reduce-scatters. ATen runs all kernels; another run by Inductor shows how much other kernels
matter. All runs start from the same parameters and see the same batches. The loss itself is always
computed in float32.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import graphshard
from benchmarks import common
from benchmarks.common import FSDP2
from benchmarks.models import parameter_bytes
from benchmarks.variants import fsdp2, mp_policy
from graphshard.ops.float8_math import RECIPES
from graphshard.tools.demo import FINAL_STEPS
from graphshard.tools.demo_model import GPT, SIZES, batches, load_text, new_model
from graphshard.tools.demo_training import Training
from tests import ranks, recording

SIZE = SIZES["cpu"]._replace(batch=2)
FP8 = {f"fp8, {recipe}": recipe for recipe in RECIPES}
RUNS = (FSDP2, "float32", "ring", "exchange", "exchange, Inductor", *FP8)


@dataclass(frozen=True)
class Learned:
    """Result of one training run.

    Attributes:
        losses: loss of each step, averaged over ranks.
        gathered_bytes: size of the full tensors that one step gathers, in their wire dtype.
        reduced_bytes: size of the full gradients that a rank reduces in one step.
    """

    losses: list[float]
    gathered_bytes: int
    reduced_bytes: int


def train(kind: str, steps: int) -> Learned:
    mesh, model = init_device_mesh("cpu", (dist.get_world_size(),)), _model()
    training = Training(kind, _sharded(kind, model, mesh))
    data = batches(load_text(), SIZE, 1 + dist.get_rank())
    for _ in range(steps):
        recording.clear()
        training.step(next(data))
    gathered, reduced = (
        sum(event.bytes for event in recording.events(*kinds))
        for kinds in (("all_gather",), ("reduce_scatter", "all_to_all"))
    )
    return Learned(training.losses, gathered, reduced)


def _model() -> GPT:
    model = new_model(SIZE, torch.device("cpu"))
    # A bfloat16 loss has three digits, so its rounding would hide the differences.
    model.head.register_forward_hook(lambda head, inputs, logits: logits.float())
    return model


def _sharded(kind: str, model: GPT, mesh: DeviceMesh) -> Any:
    policy = mp_policy(kind != "float32")
    if kind == FSDP2:
        return fsdp2(model, mesh, mp_policy=policy)
    backend = graphshard.backend(
        mesh,
        mp_policy=policy,
        fp8=graphshard.Float8Policy(FP8[kind]) if kind in FP8 else None,
        schedule=graphshard.SchedulePolicy(reduce="exchange" if "exchange" in kind else "ring"),
        compiler="inductor" if "Inductor" in kind else "aot_eager",
    )
    return torch.compile(model, backend=backend)


def _row(kind: str, learned: Learned, base: Learned) -> dict[str, str]:
    differences = [abs(a - b) for a, b in zip(learned.losses, base.losses)]
    return {
        "run": kind,
        "final loss": f"{mean(learned.losses[-FINAL_STEPS:]):.4f}",
        "mean difference": f"{mean(differences):.5f}",
        "largest": f"{max(differences):.4f}",
        "first step that differs": str(next((i for i, d in enumerate(differences) if d), "none")),
        "MB gathered": f"{learned.gathered_bytes / 1e6:.2f}",
        "MB reduced": f"{learned.reduced_bytes / 1e6:.2f}",
    }


def _note(args: argparse.Namespace) -> str:
    millions = parameter_bytes(GPT(SIZE)) / 4e6
    return (
        f"GPT of {SIZE.layers} layers, d={SIZE.dim}, {millions:.1f} M parameters; {SIZE.batch} x "
        f"{SIZE.context} bytes on each of {args.ranks} ranks, AdamW; {args.steps} steps. Final "
        f"loss: mean of the last {FINAL_STEPS} steps. Differences: from the loss of {args.runs[0]} "
        "in the same step. Gathered, reduced: full tensors of one step, in their wire dtype."
    )


def main() -> None:
    args = _arguments()
    limit_s = 600.0 + 20.0 * args.steps
    options = {"backend": recording.BACKEND, "timeout_s": limit_s}
    learned = [ranks.run_fresh(args.ranks, train, r, args.steps, **options)[0] for r in args.runs]
    rows = [_row(kind, each, learned[0]) for kind, each in zip(args.runs, learned)]
    head = common.heading("benchmarks.losses", torch.device("cpu"))
    parts = [head, common.table(rows), _note(args)]
    common.show(*parts)
    common.write_report(args.out, parts)


def _arguments() -> argparse.Namespace:
    parser = common.new_parser(__doc__)
    runs = "the first one is the baseline; default: all"
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), help=runs)
    common.add_counts(parser, steps=300, ranks=4)
    common.add_out(parser, "benchmarks/results/losses.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()
