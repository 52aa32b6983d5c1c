"""Where dumps go: the folder that a user names, and torch's own trace log.

``dump="folder"`` writes for Dynamo's graph number NN, on the first rank of the mesh alone:

    NN-forward.json, NN-forward.trace.json, NN-forward.txt      the dump, its trace and its table
    NN-forward.before.py, NN-forward.after.py                   FX code around the lowering
    NN-joint.before.py, NN-joint.after.py                       and around the joint passes
    NN-keep-forward.before.py, NN-keep-forward.after.py         and around what keeps parameters

and the same for ``backward``, or ``inference`` instead of all of them. Files of these names from an
earlier run are replaced, so each backend needs a folder of its own.
"""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

from torch import fx

from .._torch.inductor import trace_artifact
from ..kinds import GraphKind
from .dump import Dump
from .table import table
from .trace import trace

NO_CODE = "No FX code was written: the graph came from a compiler's cache, so that no pass ran."


def dumps_in(folder: Path) -> list[Path]:
    """The dumps of a folder, in the order of its graphs."""
    matches = [re.fullmatch(r"(\d+)-(\w+)\.json", path.name) for path in folder.iterdir()]
    found = [
        (int(m[1]), tuple(GraphKind).index(m[2]), m[0])
        for m in matches
        if m and m[2] in tuple(GraphKind)
    ]
    return [folder / name for *_, name in sorted(found)]


class DumpWriter:
    """Where the plans and the code of one Dynamo graph go.

    Args:
        folder: it exists; None: no file is written.
    """

    def __init__(self, folder: Path | None = None, number: int = 0) -> None:
        self._folder = folder
        self._number = number
        self._with_code: set[str] = set()
        self._with_plan: set[str] = set()

    def code(self, name: str, when: str, graph: fx.Graph) -> None:
        """Write the code of ``graph`` "before" or "after" a stage."""
        if self._folder is not None:
            self._with_code.add(name)
            code = graph.python_code("self", verbose=True).src
            self._write(f"{name}.{when}.py", code.strip() + "\n")

    def has(self, kind: str) -> bool:
        """Whether the plan of this graph was given."""
        return kind in self._with_plan

    def plan(self, dump: Dump) -> None:
        """Write the dump, its trace and its table, and log them where ``TORCH_TRACE`` says."""
        kind = dump.plan.graph
        self._with_plan.add(kind)
        trace_artifact(f"graphshard_{kind}_plan", "json", dump.to_json)
        trace_artifact(f"graphshard_{kind}_table", "string", lambda: table(dump))
        if self._folder is not None:
            note = "" if kind in self._with_code else f"\n\n{NO_CODE}"
            self._write(f"{kind}.json", dump.to_json())
            self._write(f"{kind}.trace.json", json.dumps(trace(dump)))
            self._write(f"{kind}.txt", f"{table(dump)}{note}\n")

    def _write(self, name: str, text: str) -> None:
        assert self._folder is not None
        path = self._folder / f"{self._number:02}-{name}"
        try:
            path.write_text(text)
        except OSError as error:  # one rank must not fail in the middle of a training for it
            warnings.warn(f"graphshard: dump cannot be written: {error}", stacklevel=2)
