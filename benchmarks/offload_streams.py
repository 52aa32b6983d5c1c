"""Do host copies of offloaded parameters overlap with kernels, and run in the required order?

    python -m benchmarks.offload_streams [--layers 4] [--dim 1024] [--device cpu|cuda]

One rank trains a GPT with parameters offloaded to the host. Torch's profiler records when each copy
and each collective ran on the GPU, and on which stream. The profile must show these orders, which
follow from the model of streams in graphshard/check/races.py:

    copy to the device ──► gather         a gather begins when the copies that it reads are done
    reduction ──► copy to the host        a copy begins when the reduction of its gradients is done

Without a GPU, times are those of the host's calls.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
from torch.distributed.fsdp import CPUOffloadPolicy

import graphshard
from benchmarks import common
from benchmarks.models import GPT
from graphshard.kinds import TransferKind
from graphshard.planning.buckets import next_in_chain
from graphshard.planning.plan import Plan
from graphshard.show import profile
from graphshard.show.trace import Trace, TraceEvent

OPS = {
    "graphshard::copy_to_device": TransferKind.COPY_TO_DEVICE,
    "graphshard::copy_to_host": TransferKind.COPY_TO_HOST,
    "_c10d_functional::all_gather_into_tensor": TransferKind.ALL_GATHER,
    "_c10d_functional::all_gather_into_tensor_coalesced": TransferKind.ALL_GATHER,
    "_c10d_functional::reduce_scatter_tensor": TransferKind.REDUCE_SCATTER,
    "_c10d_functional::reduce_scatter_tensor_coalesced": TransferKind.REDUCE_SCATTER,
    "_c10d_functional::all_to_all_single": TransferKind.REDUCE_SCATTER,  # over gloo
}
"""Ops that launch a transfer, by their name in a profile."""
_COPIES = (TransferKind.COPY_TO_DEVICE, TransferKind.COPY_TO_HOST)
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_RUNTIME = ("cuda_runtime", "cuda_driver")


@dataclass
class Launched:
    """The work of one launch; times are in microseconds, by the profile's clock.

    Attributes:
        kind: kind of the bucket.
        spans: start, end and stream of each piece of work; without a GPU the stream is "host".
    """

    kind: TransferKind
    spans: list[tuple[float, float, str]] = field(default_factory=list)

    @property
    def start_us(self) -> float:
        return min(start for start, _, _ in self.spans)

    @property
    def end_us(self) -> float:
        return max(end for _, end, _ in self.spans)


def launches_of(trace: Trace) -> list[Launched]:
    """Return all launches in a profile of torch.profiler, in the order of the host's calls.

    Raises:
        RuntimeError: the profile of a GPU lacks the work of a launch.
    """
    on_gpu = defaultdict(list)
    for event in _complete(trace, _ON_GPU):
        on_gpu[event["args"].get("correlation")].append(event)
    calls = [call for call in _complete(trace, ("cpu_op",)) if call["name"] in OPS]
    found = []
    for call in sorted(calls, key=lambda event: event["ts"]):
        inside = [e for e in _complete(trace, _RUNTIME) if _is_inside(e, call)]
        work = [w for e in inside for w in on_gpu[e["args"].get("correlation")]]
        if on_gpu and not work:
            raise RuntimeError(f"{call['name']}: the profile has no GPU work of this launch")
        spans = [_span(w, str(w["args"].get("stream"))) for w in work] or [_span(call, "host")]
        found.append(Launched(OPS[call["name"]], spans))
    return found


def _complete(trace: Trace, categories: Sequence[str]) -> list[TraceEvent]:
    events = (event for event in trace["traceEvents"] if event.get("ph") == "X")
    return [event for event in events if event.get("cat") in categories]


def _is_inside(event: TraceEvent, call: TraceEvent) -> bool:
    end_us = call["ts"] + call["dur"]
    return bool(event["tid"] == call["tid"] and call["ts"] <= event["ts"] <= end_us)


def _span(event: TraceEvent, stream: str) -> tuple[float, float, str]:
    return event["ts"], event["ts"] + event["dur"], stream


def violations(plans: Sequence[Plan], launches: Sequence[Launched]) -> tuple[int, list[str]]:
    """Count the orders that the plans require, and describe each violation.

    Args:
        plans: plans of the graphs, in the order in which the graphs ran.
        launches: launches of these graphs.

    Returns:
        Number of required orders, and a message for each violation.

    Raises:
        RuntimeError: the launches differ from the plans' buckets.
    """
    kinds = [bucket.kind for plan in plans for bucket in plan.buckets]
    if kinds != [launched.kind for launched in launches]:
        raise RuntimeError(
            f"the profile has {len(launches)} launches, {[str(one.kind) for one in launches]}, "
            f"but the plans have {len(kinds)}, {list(map(str, kinds))}"
        )
    num_orders, found, rest = 0, list[str](), iter(launches)
    for plan in plans:
        ran = list(islice(rest, len(plan.buckets)))
        for first, second in next_in_chain(plan.buckets).items():
            num_orders += 1
            early_us = ran[first].end_us - ran[second].start_us
            if early_us > 0:
                found.append(
                    f"{plan.graph}: {ran[second].kind} (bucket {second}) begins {early_us:.0f} us "
                    f"before {ran[first].kind} (bucket {first}) is done"
                )
    return num_orders, found


def hidden_part(launched: Sequence[Launched], trace: Trace) -> float:
    """Return the fraction of the launches' time in which kernels ran on other streams."""
    kernels = [_span(e, str(e["args"].get("stream"))) for e in _complete(trace, ("kernel",))]
    total = hidden = 0.0
    for start, end, stream in (span for one in launched for span in one.spans):
        total += end - start
        covered_to = start
        for k_start, k_end, k_stream in sorted(kernels):
            if k_stream != stream and k_end > covered_to and k_start < end:
                hidden += min(k_end, end) - max(k_start, covered_to)
                covered_to = min(k_end, end)
    return hidden / total if total else 0.0


def main() -> None:
    parser = common.new_parser(__doc__, with_device=True)
    common.add_counts(parser, layers=4, dim=1024)
    args = parser.parse_args()
    device = common.pick_device(args.device)
    common.show(common.heading("benchmarks.offload_streams", device))
    trace, plans = _profiled(args.layers, args.dim, device)
    launches = launches_of(trace)
    rows = []
    for kind in dict.fromkeys(OPS.values()):
        some = [one for one in launches if one.kind == kind]
        streams = sorted({stream for one in some for _, _, stream in one.spans})
        ms = sum(end - start for one in some for start, end, _ in one.spans) / 1e3
        rows.append(
            {
                "launched": str(kind),
                "number": str(len(some)),
                "streams": ", ".join(streams),
                "ms": f"{ms:.2f}",
                "overlapped": f"{hidden_part(some, trace):.0%}",
            }
        )
    num_orders, broken = violations(plans, launches)
    copies = [one for one in launches if one.kind in _COPIES]
    common.show(
        common.table(rows),
        *broken,
        f"offload streams: {num_orders - len(broken)} of {num_orders} orders kept; "
        f"{hidden_part(copies, trace):.0%} of the copies' time overlaps kernels",
    )


def _profiled(layers: int, dim: int, device: torch.device) -> tuple[Trace, Sequence[Plan]]:
    with common.group_of_one(device) as mesh:
        model = GPT.seeded(device, dim=dim, layers=layers, head_dim=64, vocab=8192, context=512)
        batch = model.batch(4, device)
        backend = graphshard.backend(mesh, offload_policy=CPUOffloadPolicy())
        compiled = torch.compile(model, backend=backend)
        for _ in range(3):
            compiled(batch).backward()
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch, "trace.json")
            with profile(path):
                compiled(batch).backward()
                common.synchronize(device)
            trace: Trace = json.loads(path.read_text())
    return trace, backend.plans


if __name__ == "__main__":
    main()
