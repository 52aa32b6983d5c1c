"""Does the loss depend on how gradients are reduced, in float32 or in bfloat16?

    python -m benchmarks.reductions [--steps 300] [--ranks 4]

The demo's GPT learns the demo's text in bfloat16 on the CPU: under FSDP2, which reduces gradients
in float32, and under graphshard with ``SchedulePolicy(reduce="ring")`` and ``"exchange"``, which
sends gradients in bfloat16 and sums them in float32. gloo always exchanges, so the ranks use the
tests' process group over it, for which graphshard also plans reduce-scatters. ATen runs all
kernels, which leaves the reductions as the only difference; another run by Inductor shows how much
other kernels matter. All runs start from the same parameters and see the same batches. The loss
itself is always computed in float32.
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
from graphshard.tools.demo import FINAL_STEPS
from graphshard.tools.demo_model import GPT, SIZES, batches, load_text, new_model
from graphshard.tools.demo_training import Training
from tests import ranks, recording

SIZE = SIZES["cpu"]._replace(batch=2)
KINDS = {
    FSDP2: None,
    "ring": ("ring", "aot_eager"),
    "exchange": ("exchange", "aot_eager"),
    "exchange, Inductor": ("exchange", "inductor"),
}
"""Value of ``SchedulePolicy.reduce`` and compiler of each run, or None for FSDP2."""


@dataclass(frozen=True)
class Learned:
    """Result of one training run.

    Attributes:
        losses: loss of each step, averaged over ranks.
        reduced_bytes: size of the full gradients that a rank reduces in one step, in their wire
            dtype.
    """

    losses: list[float]
    reduced_bytes: int


def train(kind: str, steps: int) -> Learned:
    mesh, model = init_device_mesh("cpu", (dist.get_world_size(),)), _model()
    training = Training(kind, _sharded(kind, model, mesh))
    data = batches(load_text(), SIZE, 1 + dist.get_rank())
    for _ in range(steps):
        recording.clear()
        training.step(next(data))
    reductions = recording.events("reduce_scatter", "all_to_all")
    return Learned(training.losses, sum(event.bytes for event in reductions))


def _model() -> GPT:
    model = new_model(SIZE, torch.device("cpu"))
    # A loss in bfloat16 has three digits: differences would be its own rounding errors.
    model.head.register_forward_hook(lambda head, inputs, logits: logits.float())
    return model


def _sharded(kind: str, model: GPT, mesh: DeviceMesh) -> Any:
    policy = mp_policy(True)
    if KINDS[kind] is None:
        return fsdp2(model, mesh, mp_policy=policy)
    reduce, compiler = KINDS[kind]
    schedule = graphshard.SchedulePolicy(reduce=reduce)
    backend = graphshard.backend(mesh, mp_policy=policy, schedule=schedule, compiler=compiler)
    return torch.compile(model, backend=backend)


def _row(kind: str, learned: Learned, fsdp2: Learned) -> dict[str, str]:
    differences = [abs(a - b) for a, b in zip(learned.losses, fsdp2.losses)]
    return {
        "reduction": kind,
        "final loss": f"{mean(learned.losses[-FINAL_STEPS:]):.4f}",
        "mean difference": f"{mean(differences):.5f}",
        "largest": f"{max(differences):.4f}",
        "first step that differs": str(next((i for i, d in enumerate(differences) if d), "none")),
        "MB reduced": f"{learned.reduced_bytes / 1e6:.2f}",
    }


def _note(args: argparse.Namespace) -> str:
    millions = parameter_bytes(GPT(SIZE)) / 4e6
    return (
        f"GPT of {SIZE.layers} layers, d={SIZE.dim}, {millions:.1f} M parameters; {SIZE.batch} x "
        f"{SIZE.context} bytes on each of {args.ranks} ranks, AdamW; {args.steps} steps. Final "
        f"loss: mean of the last {FINAL_STEPS} steps. Differences: from the loss of {FSDP2} in the "
        "same step. Reduced: gradients that a rank sends or sums in a step, in their wire dtype."
    )


def main() -> None:
    args = _arguments()
    limit_s = 600.0 + 20.0 * args.steps
    by_kind: dict[str, Learned] = {}
    for kind in KINDS:
        learned = ranks.run_fresh(
            args.ranks, train, kind, args.steps, backend="recording", timeout_s=limit_s
        )
        by_kind[kind] = learned[0]
    rows = [_row(kind, learned, by_kind[FSDP2]) for kind, learned in by_kind.items()]
    head = common.heading("benchmarks.reductions", torch.device("cpu"))
    parts = [head, common.table(rows), _note(args)]
    common.show(*parts)
    common.write_report(args.out, parts)


def _arguments() -> argparse.Namespace:
    parser = common.new_parser(__doc__)
    common.add_counts(parser, steps=300, ranks=4)
    common.add_out(parser, "benchmarks/results/reductions.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()
