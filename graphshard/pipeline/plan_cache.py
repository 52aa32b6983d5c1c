"""Store plans next to Inductor's cache, for graphs that it returns without running any pass.

A warm Inductor cache returns compiled graphs that contain the schedule, but only the process that
compiled them knew the plan. So each plan is written to a file, named by a key of the Dynamo graph
and of everything else that a plan depends on.

    rank 0   lock ─► compile ──────────────► KEY.compiled, unlock
    rank 1   wait for the lock ......................... ─► compile: all is in the cache

All ranks have the same graphs, so one rank compiles for all ranks that share a cache, with all
cores of its host. If it raises or ends, the system releases the lock and the next rank compiles. If
it takes too long or hangs, all others compile; the hanging rank is noticed later, as usual.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout
from torch import fx

from .._torch.inductor import cache_dir, caches_graphs
from ..files import write_whole
from ..kinds import GraphKind
from ..planning.plan import Plan
from .settings import CompileSettings

PLANS_FOLDER = "graphshard"
"""Name of the folder of plans in the folder of Inductor's caches."""

GRAPHS: dict[str, str] = {}
"""What each graph that this process requested from Inductor was compiled for, by its key."""


class PlanCache:
    """Plan files of one Dynamo graph.

    Args:
        gm: Dynamo graph.
        settings: settings with which the graph is compiled.

    Attributes:
        key: key of the graph and everything else that its plans depend on.
    """

    def __init__(self, gm: fx.GraphModule, settings: CompileSettings) -> None:
        self.key = settings.cache_key(gm.print_readable(print_output=False)).hex()
        self._settings = settings
        if settings.compiler == "inductor" and settings.caches_graphs:
            GRAPHS[self.key] = settings.facts()

    def save(self, plan: Plan) -> None:
        """Write the plan of one graph, still without parameter names."""
        self._folder().mkdir(parents=True, exist_ok=True)
        write_whole(self._path(plan.graph), plan.to_json())

    def load(self, kind: GraphKind) -> Plan | None:
        """Read the plan of the graph of this kind; None if it has no file."""
        path = self._path(kind)
        return Plan.from_json(path.read_text()) if path.exists() else None

    def was_compiled_before(self, time_s: float) -> bool:
        """Return whether the graph was compiled into Inductor's cache before a point in time.

        Args:
            time_s: seconds since the epoch.
        """
        mark = self._mark()
        return mark.exists() and mark.stat().st_mtime < time_s

    @contextlib.contextmanager
    def compiling(self, wait_s: float) -> Iterator[None]:
        """Hold the lock of this graph, so one process compiles for all that share Inductor's cache.

        Code is for one device, so processes on other devices do not wait.

        Args:
            wait_s: longest time to wait for the lock.
        """
        settings = self._settings
        if not (settings.compiler == "inductor" and settings.caches_graphs and caches_graphs()):
            yield
            return
        compiled = self._mark()
        if compiled.exists():
            yield
            return
        self._folder().mkdir(parents=True, exist_ok=True)
        lock = FileLock(compiled.with_suffix(".lock"))
        with contextlib.suppress(Timeout):
            lock.acquire(wait_s)
        if compiled.exists():  # if it was not cacheable after all, let all processes compile now
            lock.release()
        try:
            yield
            compiled.touch()
        finally:
            lock.release()

    def _mark(self) -> Path:
        return self._folder() / f"{self.key}-{self._settings.device.index or 0}.compiled"

    def _path(self, kind: GraphKind) -> Path:
        return self._folder() / f"{self.key}-{kind}.json"

    def _folder(self) -> Path:
        return Path(cache_dir()) / PLANS_FOLDER
