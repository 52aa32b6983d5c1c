"""How many tokens a second does a GPT train on, beside plain torch.compile and eager FSDP2?

    python -m benchmarks.throughput [--layers 12] [--dim 768] [--steps 20] [--device cpu|cuda]
    python -m benchmarks.throughput --mixed          in bfloat16 and fp8, beside all forms of FSDP2
    python -m benchmarks.throughput --wire 0.02,100  as one of 8 ranks, behind links of 20 us and
                                                     100 GB/s (benchmarks/modelled_links.py)

One rank, fp32 (TF32 on a GPU) unless --mixed, whole steps with AdamW, interleaved. On one rank
every gather and every reduction is a copy: this is the cost of sharding without a network. Behind
modelled links a way takes longer than torch.compile alone by that and by exposed communication; its
optimizer has fewer parameters.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from statistics import median
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from benchmarks import common
from benchmarks.common import FSDP2, GRAPHSHARD, GRAPHSHARD_FP8, PLAIN
from benchmarks.gpt import GPT
from benchmarks.links import parse_wire, write_behind_wire
from benchmarks.modelled_links import group_behind
from benchmarks.models import parameter_bytes
from benchmarks.ways import (
    WAYS,
    Build,
    Trained,
    add_hooks,
    asynchronous,
    fsdp2,
    mixed_dtypes,
    one_line,
    plain,
    sharded,
)
from graphshard.cost.devices import HARDWARE, find_hardware_or_default

HEAD_DIM, VOCAB = 32, 8192


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of a batch of ``rows`` sequences."""

    layers: int
    dim: int
    context: int
    rows: int


SIZES = {
    "cpu": Sizes(layers=2, dim=64, context=32, rows=2),
    "cuda": Sizes(layers=12, dim=768, context=1024, rows=8),
}
"""By type of device."""


def main() -> None:
    """Measure and print a table."""
    args = _arguments()
    device = common.pick_device(args.device)
    sizes = SIZES[device.type]
    sizes = replace(sizes, layers=args.layers or sizes.layers, dim=args.dim or sizes.dim)
    torch.set_float32_matmul_precision("high")
    common.show(common.heading("benchmarks.throughput", device))
    runs, num_bytes = {}, 0
    with TemporaryDirectory() as folder, _group(device, args) as mesh:
        for name, build in _builds(device, args, folder).items():
            model = _model(sizes, device)
            batch, num_bytes = model.batch(sizes.rows, device), parameter_bytes(model)
            runs[name] = _step(name, build(model, mesh), batch)
        seconds = common.interleave(runs, args.steps, args.warm_up)
    links = f"; the first of {args.world} ranks behind {args.wire}" if args.wire else ""
    note = (
        f"GPT of {sizes.layers} layers, d={sizes.dim}, {num_bytes / 4e6:.1f} M parameters; "
        f"{sizes.rows} × {sizes.context} tokens a step, "
        f"{mixed_dtypes(PLAIN) if args.mixed else 'fp32'}; matmuls in float32 may use TF32; "
        f"AdamW; {args.steps} steps{links}"
    )
    common.show(_table(seconds, sizes.rows * sizes.context), note, _ratio(seconds))


def _arguments() -> argparse.Namespace:
    parser = common.new_parser(__doc__, with_device=True)
    parser.add_argument("--layers", type=common.count, help="default: 12 on cuda, 2 on cpu")
    parser.add_argument("--dim", type=common.count, help="default: 768 on cuda, 64 on cpu")
    common.add_counts(parser, steps=20, warm_up=3)
    parser.add_argument("--mixed", action="store_true", help="in bfloat16 and in fp8")
    parser.add_argument(
        "--wire", type=parse_wire, metavar="ALPHA_MS,GB_PER_S", help="modelled links"
    )
    parser.add_argument(
        "--world", type=common.count, default=8, help="ranks, with --wire; default: 8"
    )
    args = parser.parse_args()
    if args.wire and (args.mixed or args.world < 2):
        parser.error("--wire takes --world of 2 or more, and no --mixed")
    return args


def _group(device: torch.device, args: argparse.Namespace) -> AbstractContextManager[DeviceMesh]:
    if args.wire is None:
        return common.group_of_one(device)
    return group_behind(args.wire, args.world, device)


def _builds(device: torch.device, args: argparse.Namespace, folder: str) -> dict[str, Build]:
    if args.mixed:
        return {PLAIN: plain, **sharded(device.type, mixed=True)}
    ways = {name: WAYS[name] for name in (PLAIN, FSDP2, GRAPHSHARD)}
    if args.wire is not None:
        base = HARDWARE["cpu"]
        if device.type == "cuda":
            base = find_hardware_or_default(torch.cuda.get_device_name(device)).hardware
        hardware = write_behind_wire(base, args.wire, args.world, folder)
        if device.type == "cpu":  # where FSDP2 waits for every gather at once, if nobody forbids it
            ways[FSDP2] = functools.partial(asynchronous, build=fsdp2)
        ways[GRAPHSHARD] = functools.partial(one_line, hardware=hardware)
    return ways


def _model(sizes: Sizes, device: torch.device) -> GPT:
    return GPT.seeded(
        device,
        dim=sizes.dim,
        layers=sizes.layers,
        head_dim=HEAD_DIM,
        vocab=VOCAB,
        context=sizes.context,
    )


def _step(name: str, model: Trained, batch: Tensor) -> Callable[[], float]:
    """Return a function that trains one step and returns its seconds."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    add_hooks(name, model, optimizer)

    def train() -> None:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return lambda: common.timed(train, batch.device).done_s


def _table(seconds: Mapping[str, Sequence[float]], tokens: int) -> str:
    """Return a row for each way; the ratio of speeds is to plain torch.compile."""
    base = median(seconds[PLAIN])
    rows = []
    for name, steps_s in seconds.items():
        half = median(steps_s)
        rows.append([name, f"{tokens / half:,.0f}", f"{half * 1e3:.2f}", f"{base / half:.3f}"])
    return common.table(["training step", "tokens/s", "median ms", "ratio"], rows)


def _ratio(seconds: Mapping[str, Sequence[float]]) -> str:
    """Return the line that ``gpu.sh`` puts into its summary."""
    base = median(seconds[PLAIN])
    shown = [name for name in (FSDP2, GRAPHSHARD, GRAPHSHARD_FP8) if name in seconds]
    ratios = [f"{name} {base / median(seconds[name]):.3f} × {PLAIN}" for name in shown]
    return f"throughput: {'; '.join(ratios)}"


if __name__ == "__main__":
    main()
