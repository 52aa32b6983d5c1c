"""What do bfloat16 and fp8 change in what is learned, and in what is gathered?

    python -m benchmarks.precision [--steps 200] [--ranks 2] [--compiler inductor]

The demo's GPT learns the demo's text over gloo on the CPU, with its AdamW and ramp, under graphshard in
float32, in bfloat16 reduced in float32, and so with fp8 linears of either recipe: from the same
parameters and batches, one training after the other, the loss itself always computed in float32.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.lr_scheduler import LinearLR

from benchmarks.common import count, heading, show, table
from benchmarks.models import parameter_bytes
from benchmarks.ways import mp_policy, sharding
from graphshard.kinds import TransferKind
from graphshard.ops.float8_math import RECIPES, device_fault
from graphshard.options.options import COMPILERS
from graphshard.tools.demo import LAST, LEARNING_RATE, RAMP, SEED, Training
from graphshard.tools.demo_model import GPT, SIZES, batches, load_text
from tests import ranks

SIZE = SIZES["cpu"]
UNSTEADY = 50  # first steps, whose differences are not compared
FLOAT32, BFLOAT16 = "float32", "bfloat16"
FP8 = {f"fp8, {recipe}": recipe for recipe in RECIPES}
HEADERS = (
    *("precision", "final loss", "ratio to bfloat16", "largest difference"),
    *("MB gathered", "bytes for scales", "ratio to float32"),
)


@dataclass(frozen=True)
class Learned:
    """``losses`` by step, on one rank or the mean over all; in one step ``gathered`` bytes of full
    tensors, and the bytes of largest values that are reduced for ``scales``."""

    losses: list[float]
    gathered: int
    scales: int

    @property
    def final(self) -> float:
        return mean(self.losses[-LAST:])


# --- on a rank -----------------------------------------------------------------------------------


def train(kind: str, steps: int, compiler: str) -> Learned:
    mesh, model = init_device_mesh("cpu", (dist.get_world_size(),)), _model()
    policy = mp_policy(kind != FLOAT32)
    backend = sharding(mesh, mp_policy=policy, fp8=FP8.get(kind), compiler=compiler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    ramp = LinearLR(optimizer, 1 / RAMP, total_iters=RAMP)
    compiled: Any = torch.compile(model, backend=backend)
    training = Training(kind, compiled, optimizer, ramp)
    data = batches(load_text(), SIZE, SEED + 1 + dist.get_rank())
    losses = [training.step(next(data)).item() for _ in range(steps)]
    gathered = sum(plan.num_bytes(TransferKind.ALL_GATHER) for plan in backend.plans)
    scales = sum(plan.num_bytes(TransferKind.ALL_REDUCE_MAX) for plan in backend.plans)
    return Learned(losses, gathered, scales)


def _model() -> GPT:
    torch.manual_seed(SEED)
    model = GPT(SIZE)
    # A loss in bfloat16 has three digits: differences would be those of its own rounding.
    model.head.register_forward_hook(lambda head, inputs, logits: logits.float())
    return model


# --- in the parent -------------------------------------------------------------------------------


def measure(kind: str, args: argparse.Namespace) -> Learned:
    limit_s = 600.0 + 20.0 * args.steps
    task = (train, kind, args.steps, args.compiler)
    each = ranks.run_fresh(args.ranks, *task, timeout_s=limit_s)
    losses = [mean(of_step) for of_step in zip(*(one.losses for one in each))]
    return Learned(losses, each[0].gathered, each[0].scales)


def _row(kind: str, it: Learned, full: Learned, half: Learned) -> list[str]:
    apart = [abs(a - b) for a, b in zip(it.losses, half.losses)][UNSTEADY:]
    return [
        kind,
        f"{it.final:.4f}",
        f"{it.final / half.final:.4f}",
        f"{max(apart):.4f}" if apart else "-",
        f"{it.gathered / 1e6:.3f}",
        f"{it.scales}",
        f"{(it.gathered + it.scales) / full.gathered:.4f}",
    ]


def _note(args: argparse.Namespace) -> str:
    millions = parameter_bytes(GPT(SIZE)) / 4e6
    return (
        f"GPT of {SIZE.layers} layers, d={SIZE.dim}, {millions:.1f} M parameters; {SIZE.batch} × "
        f"{SIZE.context} bytes on each of {args.ranks} gloo ranks, {args.compiler}, AdamW; "
        f"{args.steps} steps. Final loss: mean of the last {LAST}. Largest difference: to the loss "
        f"in bfloat16, in a step after the first {UNSTEADY}. Gathered: in a step, full tensors; the "
        "ratio counts what is reduced for scales, too."
    )


def main() -> None:
    args = _arguments()
    faults = {kind: device_fault("cpu", recipe) for kind, recipe in FP8.items()}
    kinds = [kind for kind in (FLOAT32, BFLOAT16, *FP8) if not faults.get(kind)]
    found = {kind: measure(kind, args) for kind in kinds}
    rows = [_row(kind, it, found[FLOAT32], found[BFLOAT16]) for kind, it in found.items()]
    head = heading("benchmarks.precision", torch.device("cpu"))
    left_out = [f"{kind}: left out, torch says {why!r}" for kind, why in faults.items() if why]
    parts = [head, table(HEADERS, rows), _note(args), *left_out]
    show(*parts)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("\n\n".join(parts) + "\n")


def _arguments() -> argparse.Namespace:
    shown = argparse.RawDescriptionHelpFormatter
    options = argparse.ArgumentParser(description=__doc__, formatter_class=shown)
    for name, value in {"steps": 200, "ranks": 2}.items():
        options.add_argument(f"--{name}", type=count, default=value, help="default: %(default)s")
    options.add_argument(
        "--compiler", choices=COMPILERS, default=COMPILERS[0], help="default: %(default)s"
    )
    results = Path("benchmarks/results/precision.md")
    options.add_argument("--out", type=Path, default=results, help="default: %(default)s")
    return options.parse_args()


if __name__ == "__main__":
    main()
