"""How much host time does a training step cost, compared with plain torch.compile?

    python -m benchmarks.overhead [--layers 24] [--steps 60] [--device cpu|cuda]

Forward and backward of a GPT with d=16 on one rank. The device has next to nothing to compute, so
the time is spent in guards, autograd, wrappers, hooks and launches. 24 layers have 293 parameters,
all of them sharded (over one rank). The variants are interleaved step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch
from torch import Tensor

from benchmarks import common
from benchmarks.common import GRAPHSHARD, PLAIN, Timing
from benchmarks.models import GPT
from benchmarks.variants import VARIANTS, Trained

DIM, HEAD_DIM, VOCAB, CONTEXT = 16, 8, 64, 4


def main() -> None:
    parser = common.new_parser(__doc__, with_device=True)
    common.add_counts(parser, layers=24, steps=60, warm_up=10)
    args = parser.parse_args()
    device = common.pick_device(args.device)
    with common.group_of_one(device) as mesh:
        models = {
            name: build(_model(args.layers, device), mesh) for name, build in VARIANTS.items()
        }
        num_params = len(list(models[PLAIN].parameters()))
        ids = _model(args.layers, device).batch(1, device)
        runs = {name: _step(model, ids) for name, model in models.items()}
        common.show(common.heading("benchmarks.overhead", device))
        timings = common.interleave(runs, args.steps, args.warm_up)
    ours, theirs = _median_host_s(timings[GRAPHSHARD]), _median_host_s(timings[PLAIN])
    note = f"GPT of {args.layers} layers, d={DIM}, {num_params} parameters; forward and backward"
    ratio = f"overhead: graphshard {ours * 1e3:.2f} ms = {ours / theirs:.2f} × torch.compile"
    common.show(_table(timings, device), f"{note}, {args.steps} steps", ratio)


def _model(layers: int, device: torch.device) -> GPT:
    return GPT.seeded(
        device, dim=DIM, layers=layers, head_dim=HEAD_DIM, vocab=VOCAB, context=CONTEXT
    )


def _step(model: Trained, ids: Tensor) -> Callable[[], Timing]:

    def step() -> Timing:
        timing = common.timed(lambda: model(ids).backward(), ids.device)
        model.zero_grad()
        return timing

    return step


def _median_host_s(timings: Sequence[Timing]) -> float:
    return median([timing.host_s for timing in timings])


def _table(timings: Mapping[str, Sequence[Timing]], device: torch.device) -> str:
    base = _median_host_s(timings[PLAIN])
    rows = []
    for name, steps in timings.items():
        host_s = _median_host_s(steps)
        row = {
            "fwd+bwd": name,
            "median ms": f"{host_s * 1e3:.2f}",
            "min ms": f"{min(step.host_s for step in steps) * 1e3:.2f}",
            "ratio": f"{host_s / base:.2f}",
        }
        if device.type == "cuda":
            row["median ms, GPU done"] = f"{median([step.done_s for step in steps]) * 1e3:.2f}"
        rows.append(row)
    return common.table(rows)


if __name__ == "__main__":
    main()
