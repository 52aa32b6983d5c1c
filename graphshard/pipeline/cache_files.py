"""Plan files next to Inductor's caches, and one file that moves both to another machine.

A graph in Inductor's cache is not planned again. Its plan is read from a file, named by a key of
the Dynamo graph and of everything else that a plan depends on.

    rank 0   lock ─► compile ──────────────► KEY.compiled, unlock
    rank 1   wait for the lock ......................... ─► compile: all is in the cache

Among ranks with the same graph, cache folder and device index, one compiles for all, instead of all
competing for the host's cores. If that rank raises or exits, its lock is released and the next rank
compiles. If it takes too long, all other ranks compile without waiting further.

    save_compiled   torch's cache artifacts, our plans, loaded C++ kernels ─► one file
    load_compiled   one file ─► the caches of this machine

Loading another model's file only causes a warning, since this model's graphs have other keys.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import fx

from .._torch.inductor import cache_dir, caches_graphs
from ..files import whole, write_whole
from ..kinds import GraphKind
from ..planning.plan import Plan
from ..progress import report
from .settings import CompileSettings, sources_hash

PLANS_FOLDER = "graphshard"  # in the folder of Inductor's caches

# Facts that each graph requested from Inductor depends on, keyed by ``PlanCache.key``.
GRAPHS: dict[str, str] = {}


class PlanCache:
    """Plan and code files of one Dynamo graph, named by a ``key`` of all that plans depend on."""

    def __init__(self, gm: fx.GraphModule, settings: CompileSettings) -> None:
        self.key = settings.cache_key(gm.print_readable(print_output=False)).hex()
        self._settings = settings
        # Other graphs are planned in each run, so nothing reads their files.
        self._has_files = settings.compiler == "inductor" and settings.caches_graphs
        if self._has_files:
            GRAPHS[self.key] = settings.facts()

    def save(self, plan: Plan) -> None:
        """Write the plan of one graph without parameter names, which ``Plan.named`` adds later."""
        self._write(self._path(plan.graph), plan.to_json())

    def load(self, kind: GraphKind) -> Plan | None:
        """Return the saved plan of one graph, or None if its file cannot be read or is damaged."""
        if not self._has_files:
            return None
        try:
            return Plan.from_json(self._path(kind).read_text(encoding="utf-8"))
        # The last three: valid JSON, but not a plan.
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def save_code(self, code: Mapping[str, str]) -> None:
        self._write(self._code_path(), json.dumps(code))

    def load_code(self) -> dict[str, str]:
        """Return code keyed by file name.

        Return {} if this graph was compiled without a dump, or if the file is damaged.
        """
        try:
            code: dict[str, str] = json.loads(self._code_path().read_text(encoding="utf-8"))
        except (OSError, ValueError):  # includes JSONDecodeError, UnicodeDecodeError
            return {}
        return code

    @contextlib.contextmanager
    def compiling(self, wait_s: float) -> Iterator[None]:
        """Hold this graph's lock, so that one process compiles for all that can use its result.

        Continues without the lock after ``wait_s`` seconds, once the graph is compiled, or if
        caches are off or their folder cannot be written.
        """
        if not (self._has_files and caches_graphs()):
            yield
            return
        compiled = self._mark()
        if compiled.exists():
            yield
            return
        lock = FileLock(compiled.with_suffix(".lock"))
        with contextlib.suppress(OSError):  # a Timeout, or a folder that cannot be written
            self._folder().mkdir(parents=True, exist_ok=True)
            _acquire(lock, wait_s)
        if compiled.exists():  # if the graph was not cacheable, let all processes compile at once
            lock.release()
        try:
            yield
            with contextlib.suppress(OSError):
                compiled.touch()
        finally:
            lock.release()

    def _write(self, path: Path, text: str) -> None:
        # Without the file, a later run plans and compiles again: not worth failing a step.
        if not self._has_files:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text)
        except OSError as error:
            warnings.warn(
                f"graphshard: cannot write to {path.parent} ({error.strerror}): later runs compile "
                "these graphs again",
                stacklevel=2,
            )

    def _mark(self) -> Path:
        # GPU code contains the index of the device: processes on other devices do not wait for it.
        return self._folder() / f"{self.key}-{self._settings.device.index or 0}.compiled"

    def _path(self, kind: GraphKind) -> Path:
        return self._folder() / f"{self.key}-{kind}.json"

    def _code_path(self) -> Path:
        return self._folder() / f"{self.key}-code.json"

    def _folder(self) -> Path:
        return Path(cache_dir()) / PLANS_FOLDER


def _acquire(lock: FileLock, wait_s: float) -> None:
    try:
        lock.acquire(0)
    except Timeout:
        report("waiting for another process to compile this graph")
        lock.acquire(wait_s)


# --- one file for another machine -----------------------------------------------------------------

_FORMAT, _HEADER, _GRAPHS, _FILES = 1, "header.json", "graphs", "files/"

_WORDS = {"inputs": "sizes of inputs or parameters", "modes": "modes of torch, such as autocast"}

# Facts that the graphs in all loaded files depend on, keyed like ``GRAPHS``.
_loaded: dict[str, str] = {}


def save_compiled(path: str | Path) -> None:
    """Write the code that Inductor compiled for this process, or found in its caches, to a file.

    Call it after the first steps of training and evaluation. GPU code contains the index of the
    device, so each rank of a host must save its own file, unless each sees its GPU as cuda:0
    (``torchrun --virtual-local-rank``).

    Raises:
        RuntimeError: this process has compiled nothing for graphshard that Inductor caches.
        OSError: the file cannot be written.
    """
    saved = torch.compiler.save_cache_artifacts() if GRAPHS else None
    if saved is None:
        raise RuntimeError(
            "save_compiled: this process has compiled nothing that can be saved. Run a step first, "
            'with compiler="inductor", Inductor\'s caches on and no schedule.node_cost'
        )
    header = {"format": _FORMAT, "made": _circumstances(), "graphs": GRAPHS}
    folder = Path(cache_dir()).resolve()  # resolved, like the paths in /proc/self/maps
    with whole(Path(path)) as scratch, zipfile.ZipFile(scratch, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(_HEADER, json.dumps(header))
        file.writestr(_GRAPHS, saved[0])
        for path_in_cache in dict.fromkeys(_files(folder)):
            file.write(path_in_cache, _FILES + path_in_cache.relative_to(folder).as_posix())


def load_compiled(path: str | Path) -> None:
    """Fill the caches from a file that ``save_compiled`` wrote; call this before the first step.

    The file contains code that later calls run: load only files that you trust. If a graph that the
    file does not contain is compiled later, a warning names its differences from the most
    similar graph that was loaded.

    Raises:
        ValueError: the file is not from ``save_compiled``, or was written with a different torch,
            Python, graphshard, CPU or GPU.
        OSError: the file cannot be read, or the caches cannot be written.
    """
    try:
        with zipfile.ZipFile(path) as file:
            header = json.loads(file.read(_HEADER))
            if not isinstance(header, dict):
                raise KeyError(_HEADER)
            _check(str(path), header)
            if not isinstance(graphs := header["graphs"], dict):
                raise KeyError("graphs")
            artifacts = file.read(_GRAPHS)
            for name in file.namelist():
                if name.startswith(_FILES):
                    _write(path, name.removeprefix(_FILES), file.read(name))
    except (zipfile.BadZipFile, zlib.error, KeyError, TypeError, json.JSONDecodeError) as error:
        why = (
            f"{path}: was not written by graphshard.save_compiled, or is damaged ({error}): call "
            "save_compiled again to write a new file"
        )
        raise ValueError(why) from error
    torch.compiler.load_cache_artifacts(artifacts)
    _loaded.update(graphs)


def warn_unless_loaded(key: str) -> None:
    """Warn if files were loaded but lack the graph of ``key``, and name the differences."""
    if not _loaded or key in _loaded or key not in GRAPHS:
        return
    made_for = _facts(GRAPHS[key])
    others = [_facts(text) for text in _loaded.values()]
    nearest = min(others, key=lambda other: len(_different(made_for, other)))
    names = _different(made_for, nearest)
    differs = f"other {' and '.join(names)}" if names else "another model"
    warnings.warn(
        f"compiling a graph that the loaded file does not have: the file was saved with "
        f"{differs}. To include this graph, call save_compiled again after its first step",
        stacklevel=2,
    )


def _facts(text: str) -> dict[str, str]:
    lines = (line.partition(": ") for line in text.splitlines())
    return {name: fact for name, _, fact in lines}


def _different(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    names = (name for name in {**one, **other} if one.get(name) != other.get(name))
    words = ("groups of ranks" if n.startswith("group ") else _WORDS.get(n, n) for n in names)
    return list(dict.fromkeys(words))


def _circumstances() -> dict[str, str]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "graphshard (hash of its files)": sources_hash(),
        "CPU": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "GPU": gpu,
    }


def _check(path: str, header: dict[str, Any]) -> None:
    if header.get("format") != _FORMAT:
        raise ValueError(
            f"{path}: has format {header.get('format')}, but this version of graphshard "
            f"reads format {_FORMAT}; write it again with graphshard.save_compiled"
        )
    made, here = dict(header["made"]), _circumstances()
    changes = [f"{n} was {made.get(n)} and is {here[n]}" for n in here if made.get(n) != here[n]]
    if changes:
        raise ValueError(
            f"{path}: was saved in another environment: {'; '.join(changes)}. Run a step without "
            "the file, and save it again"
        )


def _files(folder: Path) -> Iterator[Path]:
    """Yield the cache files that torch does not save: plans, and libraries in use."""
    for key in GRAPHS:
        yield from (folder / PLANS_FOLDER).glob(f"{key}-*")
    # Libraries with which Inductor probed the vector instructions of the CPU. Libraries of kernels,
    # ``*.main.so``, may belong to other models: take only those that this process has mapped.
    for path in folder.glob("??/*.so"):
        if path.with_suffix(".cpp").exists() and not path.stem.endswith(".main"):
            yield path
    maps = Path("/proc/self/maps")
    if maps.exists():
        lines = os.fsdecode(maps.read_bytes()).split("\n")
        paths = {Path(line.split(maxsplit=5)[-1].rstrip()) for line in lines if "/" in line}
        # A file that was removed or replaced since it was mapped is shown as "... (deleted)".
        yield from sorted(p for p in paths if p.is_relative_to(folder) and p.exists())


def _write(archive: str | Path, name: str, contents: bytes) -> None:
    path = Path(cache_dir(), name)
    if not path.resolve().is_relative_to(Path(cache_dir()).resolve()):
        raise ValueError(
            f"{archive}: has an entry outside of the cache folder, {name!r}, which "
            "graphshard.save_compiled never writes: do not load this file"
        )
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as scratch:
        scratch.write_bytes(contents)
        scratch.chmod(0o755)
