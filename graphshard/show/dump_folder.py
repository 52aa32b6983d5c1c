"""The places of dumps: the folder that a user names, and torch's own trace log.

``dump="folder"`` writes for Dynamo's graph number NN, on the first rank of the mesh alone:

    NN-forward.json, NN-forward.trace.json, NN-forward.txt      the dump, its trace and its table
    NN-forward.before.py, NN-forward.after.py                   FX code around the lowering
    NN-joint.before.py, NN-joint.after.py                       and around the joint passes
    NN-keep-forward.before.py, NN-keep-forward.after.py         and around what keeps parameters
    NN-stow-forward.before.py, NN-stow-forward.after.py         and around activation offload

All but ``joint`` exist for ``backward``, too; an inference has ``NN-inference`` files alone. Files
of these names from an earlier run are replaced, so each backend needs a folder of its own.
"""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Literal

from torch import fx

from .._torch.inductor import trace_artifact
from ..kinds import GraphKind
from .dump import Dump
from .table import table
from .trace import trace

NO_CODE = "No FX code was written: the graph came from a compiler's cache, so that no pass ran."


def dump_paths(folder: Path) -> list[Path]:
    """Return the files in ``folder`` that are named as dumps, in the order of its graphs."""
    kinds = list(GraphKind)
    pattern = re.compile(rf"(\d+)-({'|'.join(kinds)})\.json")
    matches = [(path, pattern.fullmatch(path.name)) for path in folder.iterdir()]
    ordered = sorted(
        (int(match[1]), kinds.index(GraphKind(match[2])), path) for path, match in matches if match
    )
    return [path for _, _, path in ordered]


class DumpWriter:
    """Writes the plans and the code of one Dynamo graph.

    Args:
        folder: it exists; None: no file is written.
        number: of the graph; names of files begin with it.
    """

    def __init__(self, folder: Path | None = None, number: int = 0) -> None:
        self._folder = folder
        self._number = number
        self._stages_with_code: set[str] = set()

    def write_code(self, stage: str, when: Literal["before", "after"], graph: fx.Graph) -> None:
        """Write the code of ``graph`` before or after a stage."""
        if self._folder is not None:
            self._stages_with_code.add(stage)
            code = graph.python_code("self", verbose=True).src
            self._write(self._folder, f"{stage}.{when}.py", code.strip() + "\n")

    def write_plan(self, dump: Dump) -> None:
        """Write the dump, its trace and its table, and log them where ``TORCH_TRACE`` says."""
        kind = dump.plan.graph
        trace_artifact(f"graphshard_{kind}_plan", "json", dump.to_json)
        trace_artifact(f"graphshard_{kind}_table", "string", lambda: table(dump))
        if self._folder is not None:
            note = "" if kind in self._stages_with_code else f"\n\n{NO_CODE}"
            self._write(self._folder, f"{kind}.json", dump.to_json())
            self._write(self._folder, f"{kind}.trace.json", json.dumps(trace(dump)))
            self._write(self._folder, f"{kind}.txt", f"{table(dump)}{note}\n")

    def _write(self, folder: Path, name: str, text: str) -> None:
        try:
            (folder / f"{self._number:02}-{name}").write_text(text)
        except OSError as error:  # one rank must not fail in the middle of a training for it
            warnings.warn(f"graphshard: dump cannot be written: {error}", stacklevel=2)
