"""Which optimizers work on sharded parameters, and what does a step of Muon cost?

    python -m benchmarks.optimizers [--layers 8] [--dim 320] [--steps 7] [--warm-up 2]

Muon: steps of all matrices of a GPT's blocks over gloo on the CPU, without forward and backward, by
torch.optim.Muon on DTensors and by graphshard.optim.Muon, interleaved. A process group counts the
bytes that a rank sends in a step; they are averaged over ranks. Memory is the peak resident memory
of a rank during a step, minus its resident memory before the step.

The table of optimizers, described in benchmarks/optimizer_table.py, omits packages that are not
installed (pip install torchao transformers schedulefree pytorch_optimizer).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from benchmarks import common
from benchmarks.memory import give_memory_back, peak_of
from benchmarks.models import GPT
from benchmarks.optimizer_table import CASES, SAME, Case, Outcome, try_out
from tests import ranks, recording

NUM_RANKS = (2, 4)
HEAD_DIM, VOCAB, CONTEXT = 32, 512, 64
THEIRS, OURS = "torch.optim.Muon", "graphshard.optim.Muon"
MUONS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    THEIRS: torch.optim.Muon,
    OURS: graphshard.optim.Muon,
}
LIMIT_S = 600.0
SENT = {"all_gather": 1.0, "reduce_scatter": 1.0, "all_reduce": 2.0, "all_to_all": 1.0}
"""Bytes that a rank sends per byte of the full buffers, by kind of collective.

On n ranks, multiply by (n - 1) / n.
"""


# --- on a rank -----------------------------------------------------------------------------------


def _step_functions(dim: int, layers: int) -> dict[str, Callable[[], object]]:
    device = torch.device("cpu")
    model = GPT.seeded(
        device, dim=dim, layers=layers, head_dim=HEAD_DIM, vocab=VOCAB, context=CONTEXT
    )
    graphshard.shard(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    matrices = [param for param in model.blocks.parameters() if param.ndim == 2]
    for param in matrices:
        param.grad = torch.randn_like(param)
    optimizers = {name: kind(matrices, lr=1e-3) for name, kind in MUONS.items()}
    return {name: optimizer.step for name, optimizer in optimizers.items()}


def time_steps(dim: int, layers: int, steps: int, warm_up: int) -> dict[str, list[float]]:
    """Return each optimizer's seconds per step; a step ends when the slowest rank is done."""
    device, runs = torch.device("cpu"), _step_functions(dim, layers)

    def timed(run: Callable[[], object]) -> float:
        dist.barrier()
        return common.timed(lambda: (run(), dist.barrier()), device).done_s

    of = {name: (lambda run=run: timed(run)) for name, run in runs.items()}
    return common.interleave(of, steps, warm_up)


def sent_and_peak(dim: int, layers: int) -> dict[str, tuple[float, int]]:
    """Return, for each optimizer, the bytes that a rank sends in a step, and the peak memory.

    Assumes that all ranks send the same number of bytes in a collective. The peak excludes the
    resident memory before the step.
    """
    give_memory_back()
    runs, world, found = _step_functions(dim, layers), dist.get_world_size(), {}
    for name, run in runs.items():
        run()  # creates the state, and lets ranks agree on their calls
        recording.clear()
        memory = peak_of(run)
        full = sum(SENT[event.kind] * event.bytes for event in recording.collectives())
        found[name] = full * (world - 1) / world, memory.peak - memory.before
    return found


# --- in the parent -------------------------------------------------------------------------------


def _muon_rows(args: argparse.Namespace, num_ranks: int) -> list[dict[str, str]]:
    size = (args.dim, args.layers)
    timing = ranks.run(num_ranks, time_steps, *size, args.steps, args.warm_up, timeout_s=LIMIT_S)
    seconds = {name: [max(of) for of in zip(*(by[name] for by in timing))] for name in MUONS}
    task = (sent_and_peak, *size)
    found = ranks.run_fresh(num_ranks, *task, backend=recording.BACKEND, timeout_s=LIMIT_S)
    rows = []
    for name in MUONS:
        half = median(seconds[name])
        common.show(f"{name}, {num_ranks} ranks: {half * 1e3:.0f} ms")
        rows.append(
            {
                "Muon": f"{name}, {num_ranks} ranks",
                "median ms": f"{half * 1e3:.0f}",
                "min ms": f"{min(seconds[name]) * 1e3:.0f}",
                "ratio": f"{half / median(seconds[THEIRS]):.2f}",
                "MB sent by a rank": f"{mean(by[name][0] for by in found) / 1e6:.1f}",
                "peak MB of a step": f"{max(by[name][1] for by in found) / 1e6:.1f}",
            }
        )
    return rows


def _outcome(case: Case) -> Outcome:
    try:
        found = ranks.run(2, try_out, case, timeout_s=120.0)
    except ranks.RankError as error:
        return Outcome(f"some ranks fail: {error.failures[0].text.splitlines()[-1]}")
    return max(found, key=lambda o: (o.error is not None, o.difference, o.state != SAME))


def _table_row(case: Case) -> dict[str, str]:
    outcome = _outcome(case)
    if outcome.error is not None:
        result, state = f"raises `{_shortened(outcome.error)}`", "-"
    else:
        result = f"{outcome.difference:.0e} apart" if outcome.difference else SAME
        state = outcome.state if outcome.state == SAME else f"`{_shortened(outcome.state)}`"
    row = {
        "optimizer": f"`{case.name}`",
        "compared with an unsharded copy": result,
        "state saved and loaded": state,
        "why": case.why or "works element by element",
    }
    common.show(" | ".join(row.values()))
    return row


def _shortened(text: str) -> str:
    return text if len(text) <= 110 else text[:107] + "..."


def _versions(cases: Sequence[Case]) -> str:
    packages = dict.fromkeys(case.package for case in cases if case.package != "graphshard")
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)


def _size(args: argparse.Namespace) -> str:
    device = torch.device("meta")
    model: Any = GPT.seeded(
        device, dim=args.dim, layers=args.layers, head_dim=HEAD_DIM, vocab=VOCAB, context=CONTEXT
    )
    matrices = [param for param in model.blocks.parameters() if param.ndim == 2]
    millions = sum(param.numel() for param in matrices) / 1e6
    return (
        f"Matrices of the blocks of a GPT, d={args.dim}, {args.layers} layers: {len(matrices)} "
        f"with {millions:.1f} M elements; {args.steps} steps after {args.warm_up}, interleaved."
    )


def main() -> None:
    parser = common.new_parser(__doc__)
    common.add_counts(parser, dim=320, layers=8, steps=7, warm_up=2)
    common.add_out(parser, "benchmarks/results/optimizers.md")
    args = parser.parse_args()
    heading = common.heading("benchmarks.optimizers", torch.device("cpu"))
    muon = common.table([row for n in NUM_RANKS for row in _muon_rows(args, n)])
    common.show(heading, _size(args), muon)
    tried = [case for case in CASES if importlib.util.find_spec(case.package)]
    table = common.table([_table_row(case) for case in tried])
    common.write_report(
        args.out,
        [
            "# Optimizers",
            heading,
            "## A step of Muon",
            _size(args),
            muon,
            "## Optimizers on sharded parameters",
            f"Two ranks, three steps with the gradients of an unsharded copy; {_versions(tried)}.",
            table,
        ],
    )


if __name__ == "__main__":
    main()
