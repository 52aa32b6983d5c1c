"""How much memory does a sharded training step need at its peak, compared with eager FSDP2?

    python -m benchmarks.memory [--mb 400] [--linears 52] [--ranks 4]      an even number of ranks

Measures the peak resident memory of a rank during steps of a deep MLP over gloo on the CPU, after a
warm-up that compiles. Each variant runs in its own processes, once with glibc's own threshold and
once with a fixed one, as the note below explains. tests/multirank/test_peak_memory.py checks the
peaks with the fixed threshold.

[Note: freed memory returned to the kernel] glibc returns a freed block to the kernel at once if it
is larger than a threshold, and keeps it otherwise. It raises the threshold (up to 32 MB) whenever
it frees a larger block, so resident memory is all live blocks plus the holes left by earlier
blocks. Setting the threshold keeps glibc from raising it (as does MALLOC_MMAP_THRESHOLD_ in the
environment). Then each parameter has its own mapping, and resident memory is only the live blocks.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import common
from benchmarks.common import FSDP2, FSDP2_BLOCKS
from benchmarks.models import DeepMLP, parameter_bytes
from benchmarks.variants import Build, fsdp2, fsdp2_compiled_blocks, one_line
from tests import ranks

M_MMAP_THRESHOLD = -3  # from malloc.h
ROWS, STEPS = 8, 2
MB = 1e6


STRATEGIES: dict[str, dict[str, Any]] = {
    "ZeRO-3": {},
    "hpZ of 2": {"reshard_after_forward": 2},
    "ZeRO-2": {"reshard_after_forward": False},
    "DDP": {"overrides": {"*": {"shard": False}}},
}
"""Options of each strategy, least memory first."""


def kind_name(compiler: str, strategy: str) -> str:
    return f"{compiler}, {strategy}"


KINDS: dict[str, Build] = {FSDP2: fsdp2, FSDP2_BLOCKS: fsdp2_compiled_blocks} | {
    kind_name(compiler, strategy): functools.partial(one_line, compiler=compiler, **options)
    for compiler in ("inductor", "aot_eager")
    for strategy, options in STRATEGIES.items()
}


@dataclass(frozen=True)
class Memory:
    """Resident memory of a process that runs some work.

    Attributes:
        params: unsharded size of all parameters in bytes.
        before: resident bytes before the work.
        peak: peak resident bytes during the work.
    """

    params: int
    before: int
    peak: int


# --- on a rank -----------------------------------------------------------------------------------


def peak_is_known() -> bool:
    try:
        _forget_peak()
        return resident("VmHWM") > 0
    except (OSError, LookupError):
        return False


def resident(key: str) -> int:
    """Return a field of /proc/self/status in bytes.

    Args:
        key: "VmRSS": resident now; "VmHWM": peak since the last ``_forget_peak``; "RssAnon":
            anonymous memory.
    """
    status = Path("/proc/self/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return int(fields[key].removesuffix("kB")) * 1024


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")  # see proc_pid_clear_refs(5)


def peak_of(work: Callable[[], object], params: int = 0) -> Memory:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = resident("VmRSS")
    _forget_peak()
    work()
    return Memory(params, before, resident("VmHWM"))


def give_memory_back() -> None:
    """Set a fixed glibc threshold: see [Note: freed memory returned to the kernel]."""
    ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, 1_000_000)


def step_memory(kind: str, num_bytes: float, linears: int, give_back: bool) -> Memory:
    """Return the memory of forward, backward and an SGD step, after a warm-up.

    Args:
        kind: key of ``KINDS``.
        num_bytes: size of all parameters.
        give_back: whether to apply [Note: freed memory returned to the kernel].
    """
    if give_back:
        give_memory_back()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = DeepMLP.of_bytes(num_bytes, linears)
    params = parameter_bytes(model)
    x = torch.randn(ROWS, model.dim)
    called = KINDS[kind](model, mesh)
    called(x).backward()  # shards the parameters in all kinds, before the optimizer takes them
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.step()
            optimizer.zero_grad()
            called(x).backward()

    train(1)
    return peak_of(lambda: train(STEPS), params)


def strategies_memory(compiler: str, num_bytes: float, linears: int) -> list[int]:
    """Return the peak bytes of a step, including the model, for each of ``STRATEGIES``."""
    peaks = []
    for strategy in STRATEGIES:
        give_memory_back()
        before = peak_of(lambda: None).before
        memory = step_memory(kind_name(compiler, strategy), num_bytes, linears, give_back=True)
        peaks.append(memory.peak - before)
        torch.compiler.reset()
    return peaks


def resident_by_step(kind: str, num_bytes: float, linears: int, steps: int) -> list[int]:
    """Return the resident bytes after each training step, following two steps of warm-up."""
    give_memory_back()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = DeepMLP.of_bytes(num_bytes, linears)
    x, called = torch.randn(ROWS, model.dim), KINDS[kind](model, mesh)
    found = []
    for _ in range(steps + 2):
        called(x).backward()
        torch.optim.SGD(model.parameters(), lr=1e-3).step()
        model.zero_grad()
        found.append(resident("VmRSS"))
    return found[2:]


def sharding_memory(at_first_call: bool, num_bytes: float, linears: int) -> Memory:
    """Return the memory of sharding a model.

    Args:
        at_first_call: whether the first call of the compiled model shards it, instead of
            ``graphshard.shard``.
    """
    import graphshard

    give_memory_back()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    small, model = DeepMLP(16, 2), DeepMLP.of_bytes(num_bytes, linears)
    # Imports modules and connects ranks.
    one_line(small, mesh, compiler="aot_eager")(torch.randn(ROWS, small.dim))
    if not at_first_call:
        return peak_of(lambda: graphshard.shard(model, mesh), parameter_bytes(model))
    called, x = one_line(model, mesh, compiler="aot_eager"), torch.randn(ROWS, model.dim)
    return peak_of(lambda: called(x), parameter_bytes(model))


# --- in the parent -------------------------------------------------------------------------------


def measure(kind: str, num_bytes: float, linears: int, world: int, give_back: bool) -> Memory:
    task = step_memory, kind, num_bytes, linears, give_back
    # With ``import_env``, even an empty one, each rank imports only what it needs.
    by_rank = ranks.run_fresh(world, *task, import_env={})
    return max(by_rank, key=lambda memory: memory.peak)


def main() -> None:
    parser = common.new_parser(__doc__)
    common.add_counts(parser, mb=400, linears=52, ranks=4)
    args = parser.parse_args()
    if not peak_is_known():
        sys.exit("this kernel does not report the peak memory of a process (/proc/self/clear_refs)")
    common.show(common.heading("benchmarks.memory", torch.device("cpu")))
    rows, params, baseline = [], 0, Memory(0, 0, 1)
    for kind in KINDS:
        live, kept = (
            measure(kind, args.mb * MB, args.linears, args.ranks, give_back)
            for give_back in (True, False)
        )
        params, baseline = live.params, live if kind == FSDP2 else baseline
        row = {
            "before": live.before,
            "peak": live.peak,
            "above before": live.peak - live.before,
            "peak, holes": kept.peak,
        }
        megabytes = {heading: f"{number / MB:.0f}" for heading, number in row.items()}
        ratio = f"{live.peak / baseline.peak:.2f}"
        rows.append({"resident MB of a rank": kind, **megabytes, "ratio": ratio})
    note = (
        f"MLP of {args.linears} linear layers of one size, {params / MB:.0f} MB of parameters on "
        f"{args.ranks} ranks; peak of {STEPS} steps after the warm-up; ratio of peaks to {FSDP2}; "
        "holes: with glibc's own threshold, where freed blocks may stay resident"
    )
    common.show(common.table(rows), note)


if __name__ == "__main__":
    main()
