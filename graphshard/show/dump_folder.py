"""The places of dumps: the folder that a user names, and torch's own trace log.

``dump="folder"`` writes for Dynamo's graph number NN, on the first rank of the mesh alone:

    NN-forward.json, NN-forward.trace.json, NN-forward.txt      the dump, its trace and its table
    NN-forward.before.py, NN-forward.after.py                   FX code around the lowering
    NN-regions-forward.after.py                                 and where layers share code
    NN-joint.before.py, NN-joint.after.py                       and around the joint passes
    NN-keep-forward.before.py, NN-keep-forward.after.py         and around what keeps parameters
    NN-stow-forward.before.py, NN-stow-forward.after.py         and around activation offload
    NN-saving.json, NN-saving.txt                               what ``SchedulePolicy.auto`` tried

    index.html                                                  the page of all graphs

All but ``joint`` and ``saving`` exist for ``backward``, too; an inference has ``NN-inference``
files alone. Files of these names from an earlier run are replaced, so each backend needs a folder
of its own. The page shows all dumps that lie in the folder, and beside them what profiles there
have measured.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import statistics
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from torch import fx

from .._torch.inductor import trace_artifact
from ..files import write_whole
from ..kinds import GraphKind
from ..planning.saving import SavingChoice
from .dump import Dump
from .graph_runs import measured_us
from .page import Measured, TableData, graph_data, page, page_data
from .saving_table import saving_rows, saving_table, saving_title
from .table import table
from .trace import MEASURED, Trace, trace

PAGE = "index.html"

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


def folder_page(folder: Path) -> str:
    """Return the page of the dumps in ``folder``, with what the profiles there have measured.

    It names the files that cannot be read.
    """
    dumps: list[tuple[str, Dump]] = []
    notes: list[str] = []
    for path in dump_paths(folder):
        try:
            dumps.append((path.stem, _load(path, path.stat().st_mtime_ns)))
        except (OSError, ValueError) as error:
            notes.append(f"not shown: {error}")
    measured = _measured(folder, [dump for _, dump in dumps])
    graphs = [graph_data(dump, name, runs) for (name, dump), runs in zip(dumps, measured)]
    choices = saving_choices(folder)
    notes += dict.fromkeys(note for choice in choices for note in choice.notes)
    tables = [_saving_data(choice) for choice in choices]
    return page(page_data(f"graphshard: {folder.absolute().name}", graphs, notes, tables))


def saving_choices(folder: Path) -> list[SavingChoice]:
    """Return what ``SchedulePolicy.auto`` has chosen for the graphs in ``folder``, each once."""
    choices: dict[SavingChoice, None] = {}
    for path in sorted(folder.glob("*-saving.json")):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            choice = SavingChoice.from_json(path.read_text())
            if saving_rows(choice):  # as all that were written; others are none of ours
                choices.setdefault(choice)
    return list(choices)


def _saving_data(choice: SavingChoice) -> TableData:
    rows = saving_rows(choice)
    headers = list(rows[0])
    numbers = [headers.index(name) for name in ("ms", "peak GB")]
    texts = [list(row.values()) for row in rows]
    return TableData(title=saving_title(choice), headers=headers, numbers=numbers, rows=texts)


@functools.lru_cache(maxsize=256)
def _load(path: Path, mtime_ns: int) -> Dump:
    """Read a dump; once, since the page is written anew whenever a graph is added to it."""
    return Dump.load(path)


def _measured(folder: Path, dumps: Sequence[Dump]) -> list[Measured | None]:
    """Return by dump how long its graph took in the latest profile that has it."""
    found: list[Measured | None] = [None] * len(dumps)
    for profile in _profiles(folder):
        for i, durations in enumerate(measured_us(profile, dumps)):
            if durations:
                found[i] = Measured(runs=len(durations), median_us=statistics.median(durations))
    return found


def _profiles(folder: Path) -> Iterator[Trace]:
    """Yield what ``measured.profile`` wrote to ``folder``, from the oldest to the latest."""
    ours = re.compile(r"\d+-\w+(\.trace)?\.json")
    paths = [path for path in folder.glob("*.json") if not ours.fullmatch(path.name)]
    for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns):
        text = path.read_text(errors="replace")
        if f'"{MEASURED}: ' in text:  # before anything is parsed: it may be any file, and large
            with contextlib.suppress(ValueError):  # it is being written
                yield json.loads(text)


def write_page(folder: Path) -> None:
    """Write the page of a folder into it; a failure is a warning.

    One rank must not fail in the middle of a training for it.
    """
    try:
        write_whole(folder / PAGE, folder_page(folder))
    except (OSError, ValueError) as error:
        warnings.warn(f"graphshard: {PAGE} cannot be written: {error}", stacklevel=2)


class DumpWriter:
    """Writes the plans and the code of one Dynamo graph.

    Args:
        folder: it exists; None: no file is written.
        number: of the graph; names of files begin with it.
        since_s: when the backend was made, in seconds since the epoch.
    """

    def __init__(
        self, folder: Path | None = None, number: int = 0, *, since_s: float = 0.0
    ) -> None:
        self._folder = folder
        self._number = number
        self.since_s = since_s
        self._stages_with_code: set[str] = set()
        self._logged: dict[GraphKind, Dump] = {}

    @property
    def dumps(self) -> bool:
        """Return whether files are written."""
        return self._folder is not None

    def write_code(self, stage: str, when: Literal["before", "after"], graph: fx.Graph) -> None:
        """Write the code of ``graph`` before or after a stage."""
        if self._folder is not None:
            self._stages_with_code.add(stage)
            code = graph.python_code("self", verbose=True).src
            self._write(self._folder, f"{stage}.{when}.py", code.strip() + "\n")

    def write_plan(self, dump: Dump) -> None:
        """Write the dump, its trace and its table, and log them where ``TORCH_TRACE`` says."""
        kind = dump.plan.graph
        if self._logged.get(kind) != dump:  # equal where it is compiled again for its code
            self._logged[kind] = dump
            trace_artifact(f"graphshard_{kind}_plan", "json", dump.to_json)
            trace_artifact(f"graphshard_{kind}_table", "string", lambda: table(dump))
        if self._folder is not None:
            note = "" if kind in self._stages_with_code else f"\n\n{NO_CODE}"
            self._write(self._folder, f"{kind}.json", dump.to_json())
            self._write(self._folder, f"{kind}.trace.json", json.dumps(trace(dump)))
            self._write(self._folder, f"{kind}.txt", f"{table(dump)}{note}\n")
            write_page(self._folder)

    def write_saving(self, choice: SavingChoice) -> None:
        """Write what ``SchedulePolicy.auto`` tried, and log it where ``TORCH_TRACE`` says."""
        trace_artifact("graphshard_saving", "string", lambda: saving_table(choice))
        if self._folder is not None:
            self._write(self._folder, "saving.json", choice.to_json())
            self._write(self._folder, "saving.txt", saving_table(choice) + "\n")
            write_page(self._folder)

    def _write(self, folder: Path, name: str, text: str) -> None:
        try:
            (folder / f"{self._number:02}-{name}").write_text(text)
        except OSError as error:  # one rank must not fail in the middle of a training for it
            warnings.warn(f"graphshard: dump cannot be written: {error}", stacklevel=2)
