"""Plans kept beside Inductor's cache, for graphs that it returns without running any pass.

A warm cache of Inductor hands back compiled graphs, in which the schedule is baked in. Only the
process that compiled them knew the plan. So each plan is written to a file whose name is
a key of the Dynamo graph and of everything that a plan depends on.

    rank 0   lock ─► compile ──────────────► KEY.compiled, unlock
    rank 1   wait for the lock ......................... ─► compile: all is in the cache

Graphs are the same on all ranks, so of those that share a cache one compiles, by all cores of its
host. Where it raises or ends, the system unlocks, and the next one compiles; where it takes too
long, or does not answer, all others compile, and then miss it as ever.
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
"""In the folder of Inductor's caches."""

GRAPHS: dict[str, str] = {}
"""By key, what each graph was compiled for that this process has asked Inductor for."""


class PlanCache:
    """The files with the plans of one Dynamo graph.

    Args:
        gm: the Dynamo graph.
        settings: those by which it is compiled.

    Attributes:
        key: of the graph, and of all that its plans depend on.
    """

    def __init__(self, gm: fx.GraphModule, settings: CompileSettings) -> None:
        self.key = settings.cache_key(gm.print_readable(print_output=False)).hex()
        self._settings = settings
        if settings.compiler == "inductor" and settings.caches_graphs:
            GRAPHS[self.key] = settings.facts()

    def save(self, plan: Plan) -> None:
        """Write the plan of one graph; parameters are not named yet."""
        self._folder().mkdir(parents=True, exist_ok=True)
        write_whole(self._path(plan.graph), plan.to_json())

    def load(self, kind: GraphKind) -> Plan | None:
        """Read the plan of the graph of this kind; None if there is no file."""
        path = self._path(kind)
        return Plan.from_json(path.read_text()) if path.exists() else None

    def was_compiled_before(self, time_s: float) -> bool:
        """Return whether a process had compiled the graph into Inductor's cache by then.

        Args:
            time_s: in seconds since the epoch.
        """
        mark = self._mark()
        return mark.exists() and mark.stat().st_mtime < time_s

    @contextlib.contextmanager
    def compiling(self, wait_s: float) -> Iterator[None]:
        """Compile alone among the processes that share Inductor's cache and have this graph.

        Its code is for one device: those with another one do not wait.

        Args:
            wait_s: how long to wait for another one at most.
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
        if compiled.exists():  # what cannot be cached is then compiled by all at once
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
