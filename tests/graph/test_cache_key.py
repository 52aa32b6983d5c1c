from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import graphshard
import graphshard.passes
from graphshard.pipeline import settings
from graphshard.pipeline.settings import CompileSettings, baked_in

FOLDERS = [os.path.dirname(os.path.realpath(p.__file__)) for p in (graphshard, graphshard.passes)]


def _sources_on_disk() -> set[str]:
    return {
        os.path.join(folder, name)
        for top in FOLDERS
        for folder, _, names in os.walk(top)
        for name in names
        if name.endswith((".py", ".toml"))
    }


def test_every_source_file_is_in_key() -> None:
    files = {os.path.realpath(path) for path in settings.source_files()}
    assert files == _sources_on_disk()
    assert {Path(path).parent.name for path in files} >= {"ops", "planning", "passes", "_torch"}


@pytest.mark.parametrize("position", range(0, len(settings.source_files()), 7))
def test_changed_file_changes_key(
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


def _autocast() -> AbstractContextManager[object]:
    return torch.autocast("cpu", torch.bfloat16)


def _half_autocast() -> AbstractContextManager[object]:
    return torch.autocast("cpu", torch.float16)


def _memory_budget() -> AbstractContextManager[object]:
    return torch._functorch.config.patch(activation_memory_budget=0.5)


@contextmanager
def _setting(change: Callable[[Any], object], value: Any, default: Any) -> Iterator[None]:
    change(value)
    try:
        yield
    finally:
        change(default)


MODES: list[Callable[[], AbstractContextManager[object]]] = [
    _autocast,
    _half_autocast,
    torch.no_grad,
    torch.inference_mode,
    _memory_budget,
    lambda: _setting(torch.use_deterministic_algorithms, True, False),
    lambda: _setting(torch.set_float32_matmul_precision, "high", "highest"),
]


def test_everything_baked_into_graph_changes_key(group: str) -> None:
    cpu, x = torch.device("cpu"), torch.ones(4, 3)
    text = baked_in([x, 5], [group], cpu, {})
    assert f"group {group}: 8 ranks, stride 1" in text and "fake" in text
    others = [
        baked_in([x, 5], [], cpu, {}),
        baked_in([x, 6], [group], cpu, {}),
        baked_in([x[:2], 5], [group], cpu, {}),
        baked_in([x.double(), 5], [group], cpu, {}),
        baked_in([x.clone().requires_grad_(), 5], [group], cpu, {}),
        baked_in([x, 5], [group], cpu, {"max_autotune": True}),
        baked_in([x, 5], [group], cpu, {}, [group]),
    ]
    for mode in MODES:
        with mode():
            others.append(baked_in([x, 5], [group], cpu, {}))
    assert len({text, *others}) == 1 + len(others)
    assert baked_in([x, 5], [group], cpu, {}) == text
