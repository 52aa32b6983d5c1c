"""Atomic writes: a file is complete or absent, and no scratch file is left. Text is UTF-8."""

from __future__ import annotations

import ast
import multiprocessing
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from graphshard.files import whole, write_whole

ROOT = Path(__file__).resolve().parents[1]


def test_text_files_do_not_depend_on_locale() -> None:
    found = []
    for path in [*(ROOT / "graphshard").rglob("*.py"), *(ROOT / "passes").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            is_binary = any(getattr(arg, "value", None) in ("rb", "wb") for arg in node.args)
            is_text = name in ("read_text", "write_text", "open") and not is_binary
            if is_text and "encoding" not in [keyword.arg for keyword in node.keywords]:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found


def test_write_whole_replaces_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_whole(path, "one")
    write_whole(path, "two")
    assert path.read_text() == "two"
    assert list(tmp_path.iterdir()) == [path]


def test_concurrent_writers_do_not_interfere(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with whole(path) as first, whole(path) as second:
        first.write_text("first")
        second.write_text("second")
        assert not path.exists()
    assert path.read_text() == "first"  # its scratch file is the last to be renamed
    assert list(tmp_path.iterdir()) == [path]


def _write(path: Path, text: str, barrier: Barrier) -> None:
    with whole(path) as scratch:
        barrier.wait()
        scratch.write_text(text)
        barrier.wait()
        assert scratch.read_text() == text
        barrier.wait()


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_forked_writers_do_not_interfere(tmp_path: Path) -> None:
    # Forked processes share `id()`s and random state: neither makes scratch file names unique.
    fork, path = multiprocessing.get_context("fork"), tmp_path / "plan.json"
    barrier = fork.Barrier(2, timeout=20)
    writers = [fork.Process(target=_write, args=(path, text, barrier)) for text in ("a", "b")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert path.read_text() in ("a", "b")
    assert list(tmp_path.iterdir()) == [path]


def test_failed_write_keeps_old_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_whole(path, "one")
    with pytest.raises(KeyboardInterrupt), whole(path) as scratch:
        scratch.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "one"
    assert list(tmp_path.iterdir()) == [path]


def test_folder_appears_only_when_complete(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    with whole(target) as scratch:
        scratch.mkdir()
        (scratch / "shard").write_text("bytes")
        assert not target.exists()
    assert (target / "shard").read_text() == "bytes"
    assert list(tmp_path.iterdir()) == [target]
