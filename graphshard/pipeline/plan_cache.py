"""Plans kept beside Inductor's cache, for graphs that it returns without running any pass.

A warm cache of Inductor hands back compiled graphs, in which the schedule is baked in. Only the
process that compiled them knew the plan. So each plan is written to a file whose name is
a key of the Dynamo graph and of everything that a plan depends on.
"""

from __future__ import annotations

from pathlib import Path

from torch import fx

from .._torch.inductor import cache_dir
from ..files import write_whole
from ..kinds import GraphKind
from ..planning.plan import Plan
from .settings import CompileSettings


class PlanCache:
    """The files with the plans of one Dynamo graph.

    Args:
        gm: the Dynamo graph.
        settings: those by which it is compiled.
    """

    def __init__(self, gm: fx.GraphModule, settings: CompileSettings) -> None:
        self._key = settings.cache_key(gm.print_readable(print_output=False)).hex()

    def save(self, plan: Plan) -> None:
        """Write the plan of one graph; parameters are not named yet."""
        path = self._path(plan.graph)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, plan.to_json())

    def load(self, kind: GraphKind) -> Plan | None:
        """Read the plan of the graph of this kind; None if there is no file."""
        path = self._path(kind)
        return Plan.from_json(path.read_text()) if path.exists() else None

    def _path(self, kind: GraphKind) -> Path:
        return Path(cache_dir()) / "graphshard" / f"{self._key}-{kind}.json"
