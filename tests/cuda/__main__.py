"""Run all cases of `tests.cuda.cases` and print a table of the results.

    python -m tests.cuda [--out benchmarks/results/cuda.md]

This takes an hour on one core.
"""

from __future__ import annotations

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


NOTE = f"""{DEVICE}, bf16 (but for float32 and autocast), SGD with momentum. Nothing ran on a GPU.
"kernels": of a step but for the optimizer's; "unsharded": of torch.compile alone. "planned": by the
plan of the graph. "peak MB, step": all that is alive, the optimizer's state among it; "FSDP2": that
of eager FSDP2, a group for each layer, where it trains so. "refused": kernels of
{", ".join(TARGETS)} (fp8: the latter two) that do not compile. "faults": launches and waits that
are not in the plan's order, and races.

Where a graph needs more than planned, its sizes are others than those of the batch that was planned
for (convnet, dynamic shapes: the first batch has half as many rows), or copies of shards with
channels last are 2 % of a wide convnet's few megabytes. Where it needs less, Inductor has in one
kernel what is two in the plan, and frees what that reads earlier (llama, ZeRO-2: the gradients of
both factors of SwiGLU; moe, hpZ and autocast).

Where there are more kernels than without shards: hpZ copies each weight that backward gathers again
into a shard of its own, and fills up its rows; a replicated parameter is cast by itself, and not
with a bucket. These two strategies are outside of the bound that `make test` holds others to. Where
a step needs more than FSDP2's (llama, ZeRO-3 at 1,024 ranks: 1,663 MB against 1,422): a
collective of so many ranks costs latency most of all, so few large buckets are chosen, and all of
one is gathered at once. `SchedulePolicy(memory_budget_gb=...)` limits it.

What these steps showed in this project, and what was mended: fp8 products had layouts that cuBLASLt
does not take; copies into buckets and out of them were a kernel for each tensor; a step under
offload waited for each tensor and not for each copy; launches and waits left their order where
Inductor fuses kernels, and dead buffers were kept for later ones; an average over replicas kept
what its reduction had sent; stowed activations were written when their copy began, and laid out
anew on the host; a synchronization in a graph had gathered parameters saved for backward; an
activation was written twice, as a product reads it and as a view of it is saved; padding of kept
parameters was not planned for, and what is free within a step was; the zeros that an embedding's
gradient is added to were made before the wait that frees room for them. Convolutions had been
copied to channels last: the stand-in for a GPU had no cuDNN."""


def main() -> None:
    """Run all cases; print the table or write it to a file."""
    parser = common.new_parser(__doc__)
    parser.add_argument("--out", type=Path)
    out: Path | None = parser.parse_args().out
    rows: list[list[object]] = []
    for start in range(0, len(ALL), NUM_CASES):
        chunk = ALL[start : start + NUM_CASES]
        outcomes = call("tests.cuda.cases:run", DEVICE, chunk, timeout_s=1200)
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
    """Return peak and planned memory of the last forward graph, then of the last backward graph."""
    texts = []
    for plan, run in zip(recording.plans[-2:], recording.calls[-2:], strict=True):
        needed = peak_bytes(recording.actions, run)
        texts += [_megabytes(n) for n in (needed, planned_peak_bytes(plan))]
    return texts


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.0f}"


if __name__ == "__main__":
    main()
