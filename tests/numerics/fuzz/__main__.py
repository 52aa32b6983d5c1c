"""Run random cases, and print those that fail, with their errors.

    python -m tests.numerics.fuzz --seeds 0:500 [--shrink]

With ``--shrink``, also print a smaller case that fails in the same way.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

from tests import ranks
from tests.numerics.fuzz.case import Case, draw
from tests.numerics.fuzz.shrink import fails_unsharded, failure, headline, shrink


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.numerics.fuzz", description=__doc__)
    parser.add_argument("--seeds", "--seed", required=True, help="e.g. 123 or 1,7,100:500")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no case after this time")
    parser.add_argument("--blocks", type=int, default=5, help="maximum number of blocks")
    parser.add_argument("--split", action="store_true", help="add tensor parallelism")
    parser.add_argument("--shrink", action="store_true", help="reduce failing cases")
    parser.add_argument("--verbose", action="store_true", help="print tracebacks and times")
    arguments = parser.parse_args()
    seeds = [seed for part in arguments.seeds.split(",") for seed in _range(part)]
    failed = num_run = 0
    end = time.monotonic() + arguments.seconds
    cases = [draw(seed, arguments.blocks, splits=arguments.split) for seed in seeds]
    for case in _by_world_size(cases):
        if time.monotonic() > end:
            break
        num_run += 1
        start = time.monotonic()
        text = failure(case)
        if arguments.verbose:
            print(f"{time.monotonic() - start:.1f} s: seed {case.seed}", flush=True)
        if text is None:
            continue
        if fails_unsharded(case, text):
            print(f"plain torch.compile fails, too: {case}\n    {headline(text)}", flush=True)
            continue
        failed += 1
        print(f"FAILED {case}\n    {headline(text)}", flush=True)
        if arguments.verbose:
            print(text)
        if arguments.shrink:
            print(f"    shrunk: {shrink(case, headline(text))}", flush=True)
    print(f"{num_run} cases, {failed} failed")
    ranks.close_pools()
    return int(failed > 0)


def _range(text: str) -> range:
    """Parse "7" or "100:500"."""
    first, _, end = text.partition(":")
    return range(int(first), int(end or int(first) + 1))


def _by_world_size(cases: list[Case]) -> Iterator[Case]:
    """Yield cases sorted by world size, a hundred at a time, so that rank processes are reused."""
    for start in range(0, len(cases), 100):
        yield from sorted(cases[start : start + 100], key=lambda case: case.world_size)


if __name__ == "__main__":
    raise SystemExit(main())
