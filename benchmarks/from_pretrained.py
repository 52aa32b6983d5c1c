"""How much time and memory does it take to load a pretrained model into shards?

    python -m benchmarks.from_pretrained [--layers 14] [--ranks 2] [--rounds 3] [--out FILE]

A Llama of 2 GB in float32, with random weights, is saved to a temporary folder. Ranks then load it
over gloo on the CPU, in new processes each time: either by
``graphshard.integrations.transformers.from_pretrained``, or by ``from_pretrained`` on every rank,
followed by ``graphshard.shard``. The file is in the page cache for both.

transformers maps files into memory. Pages of a mapped file that a rank has read count as resident,
but ranks of a node share them and the kernel may reclaim them: the table also lists a rank's
anonymous memory (``RssAnon``), sampled every five milliseconds.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks import common
from benchmarks.memory import MB, peak_of, resident
from tests import ranks

WIDTH, FEED_FORWARD, VOCABULARY, HEADS = 1536, 4096, 32000, 12
SAMPLE_S = 0.005


class Cost(NamedTuple):
    """Cost of loading on one rank.

    Attributes:
        seconds: time until all ranks have loaded.
        resident: resident bytes at the peak, minus those before loading.
        own: anonymous bytes at the peak, minus those before loading.
        shards: size of the shards in bytes.
    """

    seconds: float
    resident: int
    own: int
    shards: int


def make(folder: Path, layers: int, scale: int = 1) -> None:
    """Save a Llama with random weights; ``scale`` divides its widths and its vocabulary."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY // scale,
        hidden_size=WIDTH // scale,
        intermediate_size=FEED_FORWARD // scale,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


# --- on a rank -----------------------------------------------------------------------------------


def _straight(folder: Path, mesh: DeviceMesh) -> Any:
    import transformers

    from graphshard.integrations.transformers import from_pretrained

    return from_pretrained(transformers.LlamaForCausalLM, folder, mesh)


def _whole(folder: Path, mesh: DeviceMesh) -> Any:
    import transformers

    import graphshard

    return graphshard.shard(transformers.LlamaForCausalLM.from_pretrained(folder), mesh)


VARIANTS = {"straight into shards": _straight, "all on every rank, then shard": _whole}


@contextlib.contextmanager
def _sampled_peak() -> Iterator[list[int]]:
    peak, ends = [resident("RssAnon")], threading.Event()

    def sample() -> None:
        while not ends.wait(SAMPLE_S):
            peak[0] = max(peak[0], resident("RssAnon"))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        ends.set()
        thread.join()


def load(variant: str, folder: Path, small: Path) -> Cost:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    VARIANTS[variant](small, mesh)  # imports modules and connects ranks
    models, seconds = [], []

    def work() -> None:
        dist.barrier()
        start = time.perf_counter()
        models.append(VARIANTS[variant](folder, mesh))
        dist.barrier()
        seconds.append(time.perf_counter() - start)

    peak_of(lambda: None)  # returns free memory to the kernel
    before = resident("RssAnon")
    with _sampled_peak() as own:
        memory = peak_of(work)
    shards = sum(param.to_local().nbytes for param in models[0].parameters())
    return Cost(seconds[0], memory.peak - memory.before, own[0] - before, shards)


# --- in the parent -------------------------------------------------------------------------------


def measure(variant: str, world: int, folder: Path, small: Path) -> Cost:
    costs = ranks.run_fresh(world, load, variant, folder, small, import_env={}, timeout_s=600)
    return Cost(*map(max, zip(*costs)))


def main() -> None:
    parser = common.new_parser(__doc__)
    common.add_counts(parser, layers=14, ranks=2, rounds=3)
    common.add_out(parser)
    args = parser.parse_args()
    heading = common.heading("benchmarks.from_pretrained", torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        large, small = Path(folder, "large"), Path(folder, "small")
        make(small, 1, scale=32)
        make(large, args.layers)
        size = sum(file.stat().st_size for file in large.glob("*.safetensors"))
        runs = {
            variant: functools.partial(measure, variant, args.ranks, large, small)
            for variant in VARIANTS
        }
        costs = common.interleave(runs, args.rounds, 0)
    rows = []
    for variant, rounds in costs.items():
        halves = Cost(*(statistics.median(values) for values in zip(*rounds)))
        seconds = [cost.seconds for cost in rounds]
        spread = f"{min(seconds):.1f} to {max(seconds):.1f}"
        rows.append(
            {
                "loaded": variant,
                "seconds": f"{halves.seconds:.1f}",
                "from, to": spread,
                "MB of shards": f"{halves.shards / MB:.0f}",
                "peak resident MB": f"{halves.resident / MB:.0f}",
                "peak anonymous MB": f"{halves.own / MB:.0f}",
            }
        )
    note = (
        f"Llama of {args.layers} layers, {size / MB:.0f} MB of float32, on {args.ranks} ranks; the "
        f"rank that needs the most; medians of {args.rounds} rounds, each in new processes, after "
        "loading a small model in the same way; peaks exclude memory that was resident before"
    )
    paragraphs = [heading, common.table(rows), note]
    common.show(*paragraphs)
    common.write_report(args.out, paragraphs)


if __name__ == "__main__":
    main()
