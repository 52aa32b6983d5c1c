"""Write dumps to the user's folder and to torch's trace log.

``dump="folder"`` writes these files for Dynamo graph NN (from 00), on the first rank that has it.
Files of passes that do not run are left out:

    NN-forward.json, NN-forward.trace.json, NN-forward.txt      the dump, its trace and its table
    NN-forward.before.py, NN-forward.after.py                   FX code around lowering
    NN-regions-forward.after.py                                 after repeated layers share code
    NN-joint.before.py, NN-joint.after.py                       around the joint passes
    NN-keep-forward.before.py, NN-keep-forward.after.py         around keeping parameters unsharded
    NN-offload-forward.before.py, NN-offload-forward.after.py   around activation offload
    NN-saving.json, NN-saving.txt                               candidates of ``schedule.auto``

    index.html                                                  the page of all graphs

All but ``joint`` and ``saving`` also exist for ``backward``; an inference graph has only
``NN-inference`` and ``NN-regions-inference`` files. Each backend needs its own folder: at its first
compile, it deletes files with such names that are older than itself. The page also shows
measurements from profiles in the folder, which are kept.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import statistics
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import fx
from torch.profiler import ProfilerActivity

from .._torch.inductor import trace_artifact
from ..files import write_whole
from ..kinds import GraphKind
from ..planning.saving import SavingChoice
from .dump import Dump
from .page import Json, graph_data, page, steps_data, table_data
from .step import graph_names
from .table import saving_rows, saving_table, saving_title, table
from .trace import MEASURED, GraphRun, Trace, measured_runs, trace, with_predictions

PAGE = "index.html"
# Names of all files that dumps consist of.
_OURS = re.compile(
    rf"{re.escape(PAGE)}|\d+-({'|'.join(GraphKind)}|saving)(\.json|\.trace\.json|\.txt)"
    r"|\d+-[\w-]+\.(before|after)\.py"
)


def dump_paths(folder: Path) -> list[Path]:
    """Return the paths of the dumps in ``folder``, in graph order."""
    kinds = list(GraphKind)
    pattern = re.compile(rf"(\d+)-({'|'.join(kinds)})\.json")
    matches = [(path, pattern.fullmatch(path.name)) for path in folder.iterdir()]
    ordered = sorted(
        (int(match[1]), kinds.index(GraphKind(match[2])), path) for path, match in matches if match
    )
    return [path for _, _, path in ordered]


def folder_page(folder: Path) -> str:
    """Return the page of the dumps in ``folder``, with measurements from its profiles."""
    dumps: list[tuple[str, Dump]] = []
    notes: list[str] = []
    for path in dump_paths(folder):
        try:
            dumps.append((path.stem, _load(path, path.stat().st_mtime_ns)))
        except (OSError, ValueError) as error:  # the page names the file
            notes.append(f"not shown: {error}")
    plans = [dump for _, dump in dumps]
    measured = _measured(folder, plans)
    graphs = [
        graph_data(dump, name, source, runs)
        for name, (source, dump), runs in zip(graph_names(plans), dumps, measured)
    ]
    choices = saving_choices(folder)
    notes += dict.fromkeys(note for choice in choices for note in choice.notes)
    tables = [_saving_data(choice) for choice in choices]
    title = f"graphshard: {folder.absolute().name}"
    return page(title, graphs, steps_data(plans, graphs), notes, tables)


def saving_choices(folder: Path) -> list[SavingChoice]:
    """Return the distinct choices of ``SchedulePolicy.auto`` for the graphs in ``folder``."""
    choices: dict[SavingChoice, None] = {}
    for path in sorted(folder.glob("*-saving.json")):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            choice = SavingChoice.from_json(path.read_text(encoding="utf-8"))
            if saving_rows(choice):  # skip files that graphshard did not write
                choices.setdefault(choice)
    return list(choices)


def _saving_data(choice: SavingChoice) -> Json:
    rows = saving_rows(choice)
    return table_data(saving_title(choice), list(rows[0]), [list(row.values()) for row in rows])


# Cached because the page is rewritten whenever a graph is added.
@functools.lru_cache(maxsize=256)
def _load(path: Path, mtime_ns: int) -> Dump:
    return Dump.load(path)


def _measured(folder: Path, dumps: Sequence[Dump]) -> list[Json | None]:
    """Summarize the measured runs of each dump's graph; None for a graph without any.

    For each rank, only the newest profile with runs of the graph counts.
    """
    by_rank: list[dict[int, list[GraphRun]]] = [{} for _ in dumps]
    for recorded in _profiles(folder):  # oldest first, so that newer profiles win
        rank = recorded.get("distributedInfo", {}).get("rank", 0)
        for found, runs in zip(by_rank, measured_runs(recorded, dumps)):
            if runs:
                found[rank] = sorted(runs, key=lambda run: run.us)
    return [_measured_graph(found) if found else None for found in by_rank]


def _measured_graph(by_rank: Mapping[int, Sequence[GraphRun]]) -> Json:
    first = by_rank[min(by_rank)]
    shown = {rank: runs[(len(runs) - 1) // 2] for rank, runs in sorted(by_rank.items())}
    return {
        "runs": len(first),
        "median_us": statistics.median(run.us for run in first),
        "us": max(run.us for run in shown.values()),
        "lanes": {str(rank): run.lanes for rank, run in shown.items()},  # of each rank's median run
    }


def _profiles(folder: Path) -> Iterator[Trace]:
    """Yield the traces that ``profile`` wrote to ``folder``, oldest first."""
    paths = [path for path in folder.glob("*.json") if not _OURS.fullmatch(path.name)]
    for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns):
        text = path.read_text(encoding="utf-8", errors="replace")
        if f'"{MEASURED}: ' in text:  # avoids parsing other, possibly large files
            with contextlib.suppress(ValueError):  # the file may be incomplete
                yield json.loads(text)


def delete_dumps(folder: Path, before_ns: int) -> None:
    """Delete the dumps and page in ``folder`` older than ``before_ns``; warn if that fails.

    Args:
        before_ns: time in nanoseconds since the epoch.
    """
    try:
        for path in folder.iterdir():
            if _OURS.fullmatch(path.name) and path.stat().st_mtime_ns < before_ns:
                path.unlink(missing_ok=True)  # the first rank of another mesh may delete it, too
    except OSError as error:  # must not fail training
        warnings.warn(f"graphshard: old dump cannot be deleted: {error}", stacklevel=2)


def write_page(folder: Path) -> None:
    """Write ``index.html``, the page of the dumps in ``folder``; warn if that fails."""
    try:
        write_whole(folder / PAGE, folder_page(folder))
    except Exception as error:  # must not fail training, whatever other JSON files contain
        warnings.warn(f"graphshard: {folder / PAGE} cannot be written: {error!r}", stacklevel=2)


class DumpWriter:
    """A writer of the plans and the code of one Dynamo graph.

    Args:
        folder: existing folder, or None to write no files.
        number: number of the graph, the prefix of file names.

    Attributes:
        code: code written so far, keyed by file name without the number; empty without a folder.
    """

    def __init__(self, folder: Path | None = None, number: int = 0) -> None:
        self._folder = folder
        self._number = number
        self.code: dict[str, str] = {}
        self._logged: dict[GraphKind, Dump] = {}

    @property
    def dumps(self) -> bool:
        return self._folder is not None

    def write_code(self, stage: str, when: Literal["before", "after"], graph: fx.Graph) -> None:
        if self._folder is not None:
            code = graph.python_code("self", verbose=True).src
            self.write_all({f"{stage}.{when}.py": code.strip() + "\n"})

    def write_all(self, code: Mapping[str, str]) -> bool:
        """Write ``code``, keyed like ``self.code``; return whether it is nonempty."""
        self.code.update(code)
        if self._folder is not None:
            for name, text in code.items():
                self._write(self._folder, name, text)
        return bool(code)

    def write_plan(self, dump: Dump) -> None:
        """Write the dump, trace, table and page; log the dump and the table to ``TORCH_TRACE``."""
        kind = dump.plan.graph
        if self._logged.get(kind) != dump:  # equal if recompiled with the same plan
            self._logged[kind] = dump
            trace_artifact(f"graphshard_{kind}_plan", "json", dump.to_json)
            trace_artifact(f"graphshard_{kind}_table", "string", lambda: table(dump))
        if self._folder is not None:
            self._write(self._folder, f"{kind}.json", dump.to_json())
            self._write(self._folder, f"{kind}.trace.json", json.dumps(trace(dump)))
            self._write(self._folder, f"{kind}.txt", f"{table(dump)}\n")
            write_page(self._folder)

    def write_saving(self, choice: SavingChoice) -> None:
        trace_artifact("graphshard_saving", "string", lambda: saving_table(choice))
        if self._folder is not None:
            self._write(self._folder, "saving.json", choice.to_json())
            self._write(self._folder, "saving.txt", saving_table(choice) + "\n")
            write_page(self._folder)

    def _write(self, folder: Path, name: str, text: str) -> None:
        try:
            write_whole(folder / f"{self._number:02}-{name}", text)
        # Only one rank writes; it must not fail in the middle of training.
        except (OSError, ValueError) as error:
            warnings.warn(f"graphshard: dump cannot be written: {error}", stacklevel=2)


@contextlib.contextmanager
def profile(
    path: str | Path, dump: str | Path | None = None, *, all_ranks: bool = False
) -> Iterator[torch.profiler.profile]:
    """Profile a block on CPU and GPU, and write a trace with measured and predicted events.

        with graphshard.show.profile("dump/step.trace.json"):  # dump: the backend's folder
            compiled(batch).backward()

    Each predicted timeline starts with the measured run of its graph, but not before the previous
    timeline ends. All ranks may enter; by default, only rank 0 writes. On entry, rank 0 deletes old
    files of other ranks for the same ``path``. HolisticTraceAnalysis reads the measured part. If
    the trace is in the backend's dump folder, the page there also shows measured times.

    Args:
        path: path of the trace, ``.json``; its folder must exist.
        dump: the backend's ``dump`` folder (default: the folder of ``path``).
        all_ranks: whether all ranks enter and write, to a folder that they share: for
            "step.trace.json", rank 3 writes "step.rank3.trace.json". The page stacks the timelines.

    Raises:
        ValueError: a folder does not exist, or a dump cannot be read.
    """
    path = Path(path)
    folder = path.parent if dump is None else Path(dump)
    for name, needed, remedy in (
        ("path", path.parent, "create it, or choose another for the trace"),
        ("dump", folder, "pass the folder of graphshard.backend(dump=...)"),
    ):
        if not needed.is_dir():
            raise ValueError(f"{name}: {str(needed)!r} is not an existing folder: {remedy}")
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    rank = dist.get_rank() if dist.is_initialized() else 0
    name, _, suffixes = path.name.partition(".")
    if rank == 0:
        of_rank = re.compile(rf"{re.escape(name)}\.rank\d+\.{re.escape(suffixes)}")
        for stale in path.parent.glob("*.rank*"):
            if of_rank.fullmatch(stale.name):
                stale.unlink()
    else:
        path = path.with_name(f"{name}.rank{rank}.{suffixes}")
    # If the block raises, a barrier would hold back the error.
    with torch.profiler.profile(activities=activities) as profiler:
        yield profiler
    dumps: list[Dump] = []
    try:
        if rank == 0 or all_ranks:
            dumps = [Dump.load(dump_path) for dump_path in dump_paths(folder)]
            merged = with_predictions(_measured_trace(profiler), dumps)
            path.write_text(json.dumps(merged), encoding="utf-8")
    finally:
        if all_ranks and dist.is_initialized():
            dist.barrier()  # the page shows the traces of all ranks
    if rank == 0 and dumps:
        write_page(folder)


def _measured_trace(profiler: torch.profiler.profile) -> Trace:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "measured.json")
        profiler.export_chrome_trace(str(path))
        trace: Trace = json.loads(path.read_text(encoding="utf-8"))
    return trace
