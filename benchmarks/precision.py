"""How do bfloat16 and fp8 change the loss, and the bytes that are gathered?

    python -m benchmarks.precision [--steps 200] [--ranks 2] [--compiler inductor]

Under graphshard, the demo's GPT learns the demo's text over gloo on the CPU, with the demo's AdamW
and learning rate warmup: in float32, in bfloat16 reduced in float32, and in the latter with fp8
linears, once for each recipe. All trainings start from the same parameters and see the same
batches; they run one after the other. The loss itself is always computed in float32.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import common
from benchmarks.models import parameter_bytes
from benchmarks.variants import mp_policy, sharding
from graphshard.kinds import TransferKind
from graphshard.ops.float8_math import RECIPES, float8_error
from graphshard.options.options import COMPILERS
from graphshard.tools.demo import FINAL_STEPS
from graphshard.tools.demo_model import GPT, SIZES, batches, load_text, new_model
from graphshard.tools.demo_training import Training
from tests import ranks

SIZE = SIZES["cpu"]
NUM_UNSTEADY_STEPS = 50
"""Number of first steps whose losses are not compared."""
FLOAT32, BFLOAT16 = "float32", "bfloat16"
FP8 = {f"fp8, {recipe}": recipe for recipe in RECIPES}


@dataclass(frozen=True)
class Learned:
    """Result of one training.

    Attributes:
        losses: loss of each step, averaged over ranks.
        gathered_bytes: size of the full tensors that one step gathers.
        scales_bytes: size of the absolute maxima that one step reduces for scales.
    """

    losses: list[float]
    gathered_bytes: int
    scales_bytes: int

    @property
    def final(self) -> float:
        return mean(self.losses[-FINAL_STEPS:])


# --- on a rank -----------------------------------------------------------------------------------


def train(kind: str, steps: int, compiler: str) -> Learned:
    mesh, model = init_device_mesh("cpu", (dist.get_world_size(),)), _model()
    policy = mp_policy(kind != FLOAT32)
    backend = sharding(mesh, mp_policy=policy, fp8=FP8.get(kind), compiler=compiler)
    compiled: Any = torch.compile(model, backend=backend)
    training = Training(kind, compiled)
    data = batches(load_text(), SIZE, 1 + dist.get_rank())
    for _ in range(steps):
        training.step(next(data))
    plans = backend.plans
    return Learned(
        losses=training.losses,
        gathered_bytes=sum(plan.num_bytes(TransferKind.ALL_GATHER) for plan in plans),
        scales_bytes=sum(plan.num_bytes(TransferKind.ALL_REDUCE_MAX) for plan in plans),
    )


def _model() -> GPT:
    model = new_model(SIZE, torch.device("cpu"))
    # A loss in bfloat16 has three digits: differences would be its own rounding errors.
    model.head.register_forward_hook(lambda head, inputs, logits: logits.float())
    return model


# --- in the parent -------------------------------------------------------------------------------


def measure(kind: str, args: argparse.Namespace) -> Learned:
    """Train on all ranks in precision ``kind``."""
    limit_s = 600.0 + 20.0 * args.steps
    task = (train, kind, args.steps, args.compiler)
    learned: Learned = ranks.run_fresh(args.ranks, *task, timeout_s=limit_s)[0]
    return learned


def _row(kind: str, learned: Learned, float32: Learned, bfloat16: Learned) -> dict[str, str]:
    differences = [abs(a - b) for a, b in zip(learned.losses, bfloat16.losses)]
    steady = differences[NUM_UNSTEADY_STEPS:]
    sent_bytes = learned.gathered_bytes + learned.scales_bytes
    return {
        "precision": kind,
        "final loss": f"{learned.final:.4f}",
        "ratio to bfloat16": f"{learned.final / bfloat16.final:.4f}",
        "largest difference": f"{max(steady):.4f}" if steady else "-",
        "MB gathered": f"{learned.gathered_bytes / 1e6:.3f}",
        "bytes for scales": f"{learned.scales_bytes}",
        "ratio to float32": f"{sent_bytes / float32.gathered_bytes:.4f}",
    }


def _note(args: argparse.Namespace) -> str:
    millions = parameter_bytes(GPT(SIZE)) / 4e6
    return (
        f"GPT of {SIZE.layers} layers, d={SIZE.dim}, {millions:.1f} M parameters; {SIZE.batch} × "
        f"{SIZE.context} bytes on each of {args.ranks} gloo ranks, {args.compiler}, AdamW; "
        f"{args.steps} steps. Final loss: mean of the last {FINAL_STEPS} steps. Largest "
        f"difference: from the loss in bfloat16, in any step after the first {NUM_UNSTEADY_STEPS}. "
        "Gathered: full tensors of one step; the ratio includes bytes reduced for scales."
    )


def main() -> None:
    args = _arguments()
    errors = {kind: float8_error("cpu", recipe) for kind, recipe in FP8.items()}
    kinds = [kind for kind in (FLOAT32, BFLOAT16, *FP8) if not errors.get(kind)]
    by_kind = {kind: measure(kind, args) for kind in kinds}
    rows = [
        _row(kind, learned, by_kind[FLOAT32], by_kind[BFLOAT16])
        for kind, learned in by_kind.items()
    ]
    head = common.heading("benchmarks.precision", torch.device("cpu"))
    left_out = [f"{kind}: left out, torch raises {why!r}" for kind, why in errors.items() if why]
    parts = [head, common.table(rows), _note(args), *left_out]
    common.show(*parts)
    common.write_report(args.out, parts)


def _arguments() -> argparse.Namespace:
    parser = common.new_parser(__doc__)
    common.add_counts(parser, steps=200, ranks=2)
    parser.add_argument(
        "--compiler", choices=COMPILERS, default=COMPILERS[0], help="default: %(default)s"
    )
    common.add_out(parser, "benchmarks/results/precision.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()
