"""Measure the cost of agreement between ranks, with simulated ranks on one real TCPStore.

    python -m benchmarks.agreement --ranks 64 256 1024 --out benchmarks/results/agreement.md

Each rank is a thread of this process, with its own connections and a real watcher; no collective
runs. Phases: all ranks compile graphs for the first time; all run them; one rank compiles again;
one rank runs a graph that differs from the others'. All threads share a few cores and one
interpreter, so times are upper bounds for a real job. Numbers of store operations are exact.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import common
from graphshard.errors import BackendError
from graphshard.ranks.call_log import CallLog
from graphshard.ranks.members import Members

NUM_GRAPHS = 4
PLAN = "graphs for training\n" + "\n".join(f"all_gather of layers.{i}.weight" for i in range(1000))
OTHER = PLAN.replace("layers.700.", "head.")
IDLE_S = 3.0
"""Idle seconds after the steps; more than ``watcher.STALL_S``, so a rank posts its last call."""


class SimulatedMembers(Members):
    def __init__(self, rank: int, num_ranks: int, port: int) -> None:
        self.name, self.rank = "simulated", rank
        self.global_ranks = list(range(num_ranks))
        self._port = port

    def connect(self) -> dist.Store:
        timeout = timedelta(seconds=300)
        return dist.TCPStore("127.0.0.1", self._port, is_master=False, timeout=timeout)

    def exist(self) -> bool:
        return True

    def timeout_s(self) -> float:
        return 300.0

    def release_also(self, group: dist.ProcessGroup) -> None:
        raise NotImplementedError

    def abort(self) -> None:
        pass


class _Counting:
    def __init__(self, store: Any) -> None:
        self._store, self.num_operations = store, 0

    def __getattr__(self, name: str) -> Any:
        self.num_operations += 1
        return getattr(self._store, name)


@dataclass(frozen=True)
class Phase:
    """Cost of one phase.

    Attributes:
        name: description of the phase.
        seconds: time until the last rank was done.
        operations: number of store operations, over all ranks.
        most: largest number of store operations of one rank.
        events: number of events that ranks posted: calls to compare, agreements, errors.
        keys: number of keys in the store afterwards.
        num_bytes: size of these keys and their values, in the memory of the rank that hosts the
            store.
    """

    name: str
    seconds: float
    operations: int
    most: int
    events: int
    keys: int
    num_bytes: int


class Simulation:
    def __init__(self, num_ranks: int) -> None:
        timeout = timedelta(seconds=300)
        self._server = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout
        )
        self._pool = ThreadPoolExecutor(num_ranks)
        self.num_ranks = num_ranks
        port = self._server.port
        self._logs = self._on_all(
            lambda rank: CallLog(SimulatedMembers(rank, num_ranks, port), is_alone=False)
        )
        self._stores: list[list[_Counting]] = []
        for call_log in self._logs:
            assert call_log._watcher is not None
            events: Any = call_log._watcher.events
            events._store, events._reader = _Counting(events._store), _Counting(events._reader)
            self._stores.append([events._store, events._reader])

    def _on_all(self, act: Callable[[int], Any]) -> list[Any]:
        return list(self._pool.map(act, range(self.num_ranks)))

    def phase(self, name: str, act: Callable[[int, CallLog], object], idle_s: float = 0.0) -> Phase:
        """Run ``act`` on all ranks and return its cost.

        Operations in the ``idle_s`` seconds after ``act`` are counted; ``seconds`` excludes them.
        """
        before, old, start = self._counts(), self._num_events(), time.monotonic()
        self._on_all(lambda rank: act(rank, self._logs[rank]))
        seconds = time.monotonic() - start
        time.sleep(idle_s)
        counts = [after - was for after, was in zip(self._settled_counts(), before)]
        events = self._num_events() - old
        keys = self._server.list_keys()
        num_bytes = sum(len(key) + len(self._server.get(key)) for key in keys)
        return Phase(name, seconds, sum(counts), max(counts), events, len(keys), num_bytes)

    def _counts(self) -> list[int]:
        return [sum(store.num_operations for store in stores) for stores in self._stores]

    def _settled_counts(self) -> list[int]:
        """Return the number of operations of each rank, once these numbers stop growing."""
        counts: list[int] = []
        while counts != (counts := self._counts()):
            time.sleep(0.5)
        return counts

    def _num_events(self) -> int:
        return max(call_log._watcher.num_read for call_log in self._logs)

    def close(self) -> None:
        self._on_all(lambda rank: self._logs[rank]._watcher.leave())
        self._pool.shutdown()


def _compile_all(rank: int, call_log: CallLog) -> None:
    for number in range(NUM_GRAPHS):
        call_log.first_run(f"plans of {number}", PLAN)  # before the broadcast of the plans
        call_log.first_run(f"graph {number}", PLAN)


def _run_all(rank: int, call_log: CallLog) -> None:
    for number in range(1000):
        call_log.run(f"graph {number % NUM_GRAPHS}")


def _compile_alone(rank: int, call_log: CallLog) -> None:
    call_log.first_run("graph 0", PLAN) if rank == 1 else call_log.run("graph 0")


def _differ(rank: int, call_log: CallLog) -> str:
    try:
        call_log.first_run(*(("other", OTHER) if rank == 1 else ("new", PLAN)))
    except BackendError as error:
        return str(error)
    raise AssertionError("no error")


def measure(num_ranks: int) -> tuple[list[Phase], set[str]]:
    simulation, errors = Simulation(num_ranks), list[str]()
    try:
        phases = [
            simulation.phase(f"first compile of {NUM_GRAPHS} graphs", _compile_all),
            simulation.phase("1000 steps, and idle for 3 s", _run_all, IDLE_S),
            simulation.phase("one rank compiles again", _compile_alone),
            simulation.phase("one rank differs", lambda *each: errors.append(_differ(*each))),
        ]
    finally:
        simulation.close()
    return phases, set(errors)


def _rows(num_ranks: int) -> list[dict[str, str]]:
    phases, errors = measure(num_ranks)
    assert len(errors) == 1, errors
    return [
        {
            "phase": f"{num_ranks} ranks, {p.name}",
            "seconds": f"{p.seconds:.2f}",
            "operations a rank": f"{p.operations / num_ranks:.1f}",
            "at most": f"{p.most}",
            "a second, all": (
                f"{p.operations / max(p.seconds, IDLE_S if 'idle' in p.name else 0.0):.0f}"
            ),
            "keys": f"{p.keys}",
            "KiB": f"{p.num_bytes / 1024:.0f}",
        }
        for p in phases
    ]


NOTE = """Simulated ranks on one real TCPStore, all of them threads of one process, so times are
upper bounds. Runs of graphs do not use the store; the operations of the second phase are one post,
by a rank that was idle for seconds."""


def main() -> None:
    parser = common.new_parser(__doc__)
    parser.add_argument("--ranks", type=common.count, nargs="+", default=[64, 256, 1024])
    common.add_out(parser)
    args = parser.parse_args()
    threading.stack_size(1 << 20)  # small, for up to two thousand threads
    rows = [row for num_ranks in args.ranks for row in _rows(num_ranks)]
    title = "# Cost of agreement between ranks"
    heading = common.heading("benchmarks.agreement", torch.device("cpu"))
    parts = [title, heading, NOTE, common.table(rows)]
    common.show(*parts)
    common.write_report(args.out, parts)


if __name__ == "__main__":
    main()
