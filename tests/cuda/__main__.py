"""Run all cases of `tests.cuda.cases` and print a table of the results.

    python -m tests.cuda [--cases EXPRESSION] [--out benchmarks/results/cuda.md]

This takes an hour on one core.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import torch
from tabulate import tabulate

from benchmarks import common
from graphshard.check.analysis import (
    Counts,
    count,
    order_differences,
    peak_bytes,
    peak_bytes_of_step,
    planned_peak_bytes,
)
from graphshard.check.process import call
from graphshard.check.races import find_races
from graphshard.check.step import Recording
from tests.cuda.cases import ALL, DEVICE, NUM_CASES, TARGETS, Case, Outcome

HEADERS = (
    "case", "kernels", "unsharded", "bucket copies", "collectives", "host copies", "host waits",
    "peak MB, forward", "planned", "peak MB, backward", "planned", "peak MB, step", "FSDP2",
    "refused", "faults",
)  # fmt: skip


NOTE = f"""{DEVICE}, bf16 (except for float32 and autocast), SGD with momentum. No GPU was used.
"kernels": per step, without the optimizer's; "unsharded": of plain torch.compile. "planned": peak
in the graph's plan. "peak MB, step": all live memory, including optimizer state; "FSDP2": the same
for eager FSDP2 with one group per layer, if it supports the strategy. "refused": kernels for
{", ".join(TARGETS)} that do not compile (fp8 on the latter two, mxfp8 on a B200, which is simulated
in that case). "faults": launches and waits out of the planned order, and races.

Graphs need more than planned if sizes differ from the planned batch (convnet, dynamic shapes: the
first batch has half as many rows), or because channels-last copies of shards take 2 % of a wide
convnet's few megabytes. They need less if Inductor fuses two planned kernels and frees their inputs
earlier (llama, ZeRO-2: the gradients of both factors of SwiGLU; moe, hpZ and autocast), or if a
kernel overwrites its input (routed, EP=8 on 8 ranks: 4 %).

Two strategies launch more kernels than unsharded models, and exceed the bound of `make test`: hpZ
copies each weight that backward gathers again into its own shard and pads its rows; a replicated
parameter is cast separately, not with a bucket. A step may need more memory than FSDP2's (llama,
ZeRO-3 at 1,024 ranks: 1,663 MB against 1,422): with so many ranks, latency dominates the cost of a
collective, so the planner chooses a few large buckets and gathers each at once.
`SchedulePolicy(memory_budget_gb=...)` limits that memory.

Bugs that these checks found, all fixed: fp8 matmul layouts that cuBLASLt rejects; copy-in and
copy-out with one kernel per tensor; offload that waited per tensor instead of per copy; launches
and waits reordered by Inductor's fusion, with dead buffers kept for reuse; an average over replicas
that kept its reduction's input alive; offloaded activations overwritten during their copy, and
copied to another layout on the host; a synchronization in a graph that made forward save gathered
parameters; an activation stored twice, in the layout of a matmul and as a saved view; unplanned
padding of kept parameters, and memory freed within a step that was planned as live; zeros for an
embedding's gradient allocated before the wait that frees memory for them; convolutions copied to
channels-last, since the simulated GPU had no cuDNN; with tensor parallelism, gradients that are
parts of larger tensors (of an embedding, of gathered logits) planned without the rest."""


def main() -> None:
    parser = common.new_parser(__doc__)
    parser.add_argument("--cases", default="", help="a regular expression, such as TP=2 (all)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    out: Path | None = args.out
    if args.cases and out:
        parser.error("--out is for the table of all cases: omit --cases")
    chosen = [case for case in ALL if re.search(args.cases, str(case))]
    rows: list[list[object]] = []
    for device, group in itertools.groupby(chosen, lambda case: case.device):
        cases = list(group)
        for start in range(0, len(cases), NUM_CASES):
            chunk = cases[start : start + NUM_CASES]
            outcomes = call("tests.cuda.cases:run", device, chunk, timeout_s=1200)
            rows += [_row(case, outcome) for case, outcome in zip(chunk, outcomes, strict=True)]
    paragraphs = [
        f"# Steps on a simulated GPU\n\n`python -m tests.cuda`, torch {torch.__version__}",
        NOTE,
        tabulate(rows, HEADERS, tablefmt="github"),
    ]
    text = "\n\n".join(paragraphs) + "\n"
    out.write_text(text) if out else print(text)


def _row(case: Case, outcome: Outcome) -> list[object]:
    recording = outcome.recording
    if recording is None:
        return [str(case), outcome.error.splitlines()[-1]]
    counts, theirs = _counts(recording), outcome.unsharded and _counts(outcome.unsharded)
    refused = [k for kernels in outcome.kernels.values() for k in kernels if k.error]
    faults = [fault for run in recording.calls for fault in order_differences(recording.plans, run)]
    return [
        str(case),
        counts.kernels,
        theirs.kernels if theirs else "",
        counts.bucket_copies,
        counts.collectives,
        counts.host_copies,
        counts.host_waits,
        *_peaks(recording),
        _megabytes(peak_bytes_of_step(recording.actions)),
        _megabytes(peak_bytes_of_step(outcome.fsdp2.actions)) if outcome.fsdp2 else "",
        f"{len(refused)} of {sum(map(len, outcome.kernels.values()))}",
        len(faults) + len(find_races(recording.actions)),
    ]


def _counts(recording: Recording) -> Counts:
    return count(recording.actions, recording.calls)


def _peaks(recording: Recording) -> list[str]:
    texts = []
    for plan, run in zip(recording.plans[-2:], recording.calls[-2:], strict=True):
        needed = peak_bytes(recording.actions, run)
        texts += [_megabytes(n) for n in (needed, planned_peak_bytes(plan))]
    return texts


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.0f}"


if __name__ == "__main__":
    main()
