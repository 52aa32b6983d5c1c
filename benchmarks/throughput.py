"""How many tokens a second does a GPT train on, beside plain torch.compile and eager FSDP2?

    python -m benchmarks.throughput [--layers 12] [--dim 768] [--steps 20] [--device cpu|cuda]
    python -m benchmarks.throughput --mixed          in bfloat16 and fp8, beside all forms of FSDP2

One rank, fp32 (TF32 on a GPU) unless --mixed, whole steps with AdamW, interleaved. On one rank every
gather and every reduction is a copy: what is measured is the cost of sharding without a network.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.common import (
    FSDP2,
    GRAPHSHARD,
    GRAPHSHARD_FP8,
    PLAIN,
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
from benchmarks.models import GPT, parameter_bytes
from benchmarks.ways import WAYS, Build, add_hooks, mixed_dtypes, plain, sharded

# By device: layers, dim, context, rows of a batch.
SIZES = {"cpu": (2, 64, 32, 2), "cuda": (12, 768, 1024, 8)}
HEAD_DIM, VOCAB = 32, 8192


def main() -> None:
    args = _arguments()
    device = pick_device(args.device)
    layers, dim, context, rows = SIZES[device.type]
    layers, dim = args.layers or layers, args.dim or dim
    torch.set_float32_matmul_precision("high")
    mesh = join_group(device)
    show(heading("benchmarks.throughput", device))
    runs, num_bytes = {}, 0
    for name, build in _builds(device.type, args.mixed).items():
        model = _model(layers, dim, context, device)
        batch, num_bytes = model.batch(rows, device), parameter_bytes(model)
        runs[name] = _step(name, build(model, mesh), batch)
    seconds = interleave(runs, args.steps, args.warm_up)
    tokens = rows * context
    size = f"GPT of {layers} layers, d={dim}, {num_bytes / 4e6:.1f} M parameters"
    dtypes = mixed_dtypes(PLAIN) if args.mixed else "fp32"
    work = f"{rows} × {context} tokens a step, {dtypes}; matmuls in float32 may use TF32; AdamW"
    show(_table(seconds, tokens), f"{size}; {work}; {args.steps} steps", _ratio(seconds))
    torch.distributed.destroy_process_group()


def _arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--layers", type=count, help="default: 12 on cuda, 2 on cpu")
    options.add_argument("--dim", type=count, help="default: 768 on cuda, 64 on cpu")
    options.add_argument("--steps", type=count, default=20, help="default: %(default)s")
    options.add_argument("--warm-up", type=count, default=3, help="steps; default: %(default)s")
    options.add_argument("--mixed", action="store_true", help="in bfloat16 and in fp8")
    return options.parse_args()


def _builds(device_type: str, mixed: bool) -> dict[str, Build]:
    if mixed:
        return {PLAIN: plain, **sharded(device_type, mixed=True)}
    return {name: WAYS[name] for name in (PLAIN, FSDP2, GRAPHSHARD)}


def _model(layers: int, dim: int, context: int, device: torch.device) -> GPT:
    torch.manual_seed(0)
    with device:
        heads = max(1, dim // HEAD_DIM)
        return GPT(dim=dim, layers=layers, heads=heads, vocab=VOCAB, context=context)


def _step(name: str, model: nn.Module, batch: Tensor) -> Callable[[], float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    add_hooks(name, model, optimizer)

    def train() -> None:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return lambda: timed(train, batch.device).done_s


def _table(seconds: dict[str, list[float]], tokens: int) -> str:
    base = median(seconds[PLAIN])
    rows = []
    for name, of_way in seconds.items():
        half = median(of_way)
        rows.append([name, f"{tokens / half:,.0f}", f"{half * 1e3:.2f}", f"{base / half:.3f}"])
    return table(["training step", "tokens/s", "median ms", "ratio"], rows)


def _ratio(seconds: dict[str, list[float]]) -> str:
    base = median(seconds[PLAIN])
    ours = [name for name in (GRAPHSHARD, GRAPHSHARD_FP8) if name in seconds]
    ratios = [f"{name} {base / median(seconds[name]):.3f} × {PLAIN}" for name in ours]
    return f"throughput: {'; '.join(ratios)}"


if __name__ == "__main__":
    main()
