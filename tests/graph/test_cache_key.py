"""A change in any source file of ours makes other keys for the caches of compiled graphs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import graphshard
import graphshard.passes
from graphshard.pipeline import settings
from graphshard.pipeline.settings import CompileSettings

FOLDERS = [os.path.dirname(os.path.realpath(p.__file__)) for p in (graphshard, graphshard.passes)]


def _sources_on_disk() -> set[str]:
    """Real paths of all Python files below the folders of the package and of its passes."""
    return {
        os.path.join(folder, name)
        for top in FOLDERS
        for folder, _, names in os.walk(top)
        for name in names
        if name.endswith(".py")
    }


def test_every_source_file_is_part_of_the_key() -> None:
    files = {os.path.realpath(path) for path in settings.source_files()}
    assert files == _sources_on_disk()
    assert {Path(path).parent.name for path in files} >= {"ops", "planning", "passes", "_torch"}


@pytest.mark.parametrize("position", range(0, len(settings.source_files()), 7))
def test_a_changed_file_changes_the_key(
    position: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = graphshard.SchedulePolicy()
    compile_settings = CompileSettings("aot_eager", policy, torch.device("cpu"))
    monkeypatch.setattr(CompileSettings, "fingerprint", lambda self: "")
    before = compile_settings.cache_key("graph")
    sources = settings.source_files()
    changed = tmp_path / "changed.py"
    changed.write_text(Path(sources[position]).read_text() + "\n# changed\n")
    sources[position] = str(changed)
    monkeypatch.setattr(settings, "_SOURCES", tuple(sources))
    assert compile_settings.cache_key("graph") != before
