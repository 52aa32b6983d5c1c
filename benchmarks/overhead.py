"""How much host time does a training step cost beyond plain torch.compile?

    python -m benchmarks.overhead [--layers 24] [--steps 60] [--device cpu|cuda]

Forward and backward of a GPT with d=16 on one rank: the device has next to nothing to compute, so
the time is that of guards, autograd, wrappers, hooks and launches. 24 layers have 293 parameters,
each of them sharded (over one rank) and gathered by itself. The ways are interleaved step by step.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.common import (
    GRAPHSHARD,
    PLAIN,
    Timing,
    count,
    heading,
    interleave,
    join_group,
    median,
    parser,
    pick_device,
    show,
    table,
    timed,
)
from benchmarks.models import GPT
from benchmarks.ways import WAYS

DIM, HEADS, VOCAB, CONTEXT = 16, 2, 64, 4


def main() -> None:
    args = _arguments()
    device = pick_device(args.device)
    mesh = join_group(device)
    models = {name: build(_model(args.layers, device), mesh) for name, build in WAYS.items()}
    num_params = len(list(models[PLAIN].parameters()))
    ids = _model(args.layers, device).batch(1, device)
    runs = {name: _step(model, ids) for name, model in models.items()}
    show(heading("benchmarks.overhead", device))
    timings = interleave(runs, args.steps, args.warm_up)
    ours, theirs = (median([t.host_s for t in timings[way]]) for way in (GRAPHSHARD, PLAIN))
    note = f"GPT of {args.layers} layers, d={DIM}, {num_params} parameters; forward and backward"
    ratio = f"overhead: graphshard {ours * 1e3:.2f} ms = {ours / theirs:.2f} × torch.compile"
    show(_table(timings, device), f"{note}, {args.steps} steps", ratio)
    torch.distributed.destroy_process_group()


def _arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--layers", type=count, default=24, help="default: %(default)s")
    options.add_argument("--steps", type=count, default=60, help="default: %(default)s")
    options.add_argument("--warm-up", type=count, default=10, help="steps; default: %(default)s")
    return options.parse_args()


def _model(layers: int, device: torch.device) -> GPT:
    torch.manual_seed(0)
    with device:
        return GPT(dim=DIM, layers=layers, heads=HEADS, vocab=VOCAB, context=CONTEXT)


def _step(model: nn.Module, ids: Tensor) -> Callable[[], Timing]:
    def step() -> Timing:
        timing = timed(lambda: model(ids).backward(), ids.device)
        model.zero_grad()
        return timing

    return step


def _table(timings: dict[str, list[Timing]], device: torch.device) -> str:
    base = median([t.host_s for t in timings[PLAIN]])
    headers = ["fwd+bwd", "median ms", "min ms", "ratio"]
    if device.type == "cuda":
        headers.append("median ms, GPU done")
    rows = []
    for name, of_way in timings.items():
        host = [t.host_s for t in of_way]
        row = [name, f"{median(host) * 1e3:.2f}", f"{min(host) * 1e3:.2f}"]
        row += [f"{median(host) / base:.2f}", f"{median([t.done_s for t in of_way]) * 1e3:.2f}"]
        rows.append(row[: len(headers)])
    return table(headers, rows)


if __name__ == "__main__":
    main()
