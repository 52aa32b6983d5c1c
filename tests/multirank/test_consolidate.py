from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from graphshard import __main__
from graphshard.tools import checkpoint as checkpoint_files
from tests import ranks
from tests.models import GPT
from tests.numerics.compare import compile_sharded, draw, whole


def _save(folder: str) -> dict[str, Any]:
    model = GPT()
    compiled = compile_sharded(model)
    optimizer = torch.optim.AdamW(model.parameters())
    compiled(draw(GPT.batch, 0)[dist.get_rank()]).backward()
    optimizer.step()
    optim = get_optimizer_state_dict(model, optimizer)
    state = {"model": model.state_dict(), "optim": optim, "note": "third epoch"}
    dcp.save(state, checkpoint_id=folder)
    return _unsharded(state)


def _unsharded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _unsharded(of) for key, of in value.items()}
    if isinstance(value, list):
        return [_unsharded(of) for of in value]
    return whole(value) if isinstance(value, Tensor) else value


def _assert_equal(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for key in ours:
            _assert_equal(ours[key], theirs[key])
    elif isinstance(ours, list):
        for pair in zip(ours, theirs, strict=True):
            _assert_equal(*pair)
    elif isinstance(ours, Tensor):
        assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype
    else:
        assert ours == theirs


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("saved") / "step"
    return folder, ranks.run(2, _save, str(folder))[0]


def _run(*arguments: object) -> int:
    return __main__.main(["consolidate", *map(str, arguments)])


@pytest.mark.parametrize("batch_bytes", [1, 1 << 30])
def test_checkpoint_is_written_as_one_file(
    checkpoint: tuple[Path, dict[str, Any]],
    batch_bytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, state = checkpoint
    monkeypatch.setattr(checkpoint_files, "BATCH_BYTES", batch_bytes)
    assert _run(folder, tmp_path / "full.pt") == 0
    assert _run(folder, tmp_path / "model.safetensors", "--key", "model") == 0
    _assert_equal(torch.load(tmp_path / "full.pt"), state)
    _assert_equal(load_file(tmp_path / "model.safetensors"), dict(sorted(state["model"].items())))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full.pt", "model.safetensors"]


def test_files_convert_back_to_checkpoints(
    checkpoint: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, state = checkpoint
    _run(folder, tmp_path / "model.safetensors", "--key", "model")
    _run(folder, tmp_path / "full.pt")
    _run(tmp_path / "model.safetensors", tmp_path / "model")
    _run(tmp_path / "full.pt", tmp_path / "of key", "--key", "model")
    for name in ("model", "of key"):
        loaded = {key: torch.zeros_like(of) for key, of in state["model"].items()}
        dcp.load(loaded, checkpoint_id=tmp_path / name, no_dist=True)
        _assert_equal(loaded, dict(state["model"]))
    _run(tmp_path / "model", tmp_path / "again.safetensors")
    _assert_equal(
        load_file(tmp_path / "again.safetensors"), load_file(tmp_path / "model.safetensors")
    )


@pytest.fixture
def prefixed(tmp_path: Path) -> Path:
    """A checkpoint like Lightning's, of a module that contains the model and a metric."""
    names = {"net.a.weight": torch.ones(2), "net.b": torch.zeros(3), "seen": torch.ones(1)}
    folder = tmp_path / "prefixed"
    dcp.save({"state_dict": names, "other": torch.ones(1)}, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize("prefix", ["net", "net."])
def test_prefix_is_stripped_from_names(prefixed: Path, tmp_path: Path, prefix: str) -> None:
    options = ("--key", "state_dict", "--strip-prefix", prefix)
    assert _run(prefixed, tmp_path / "model.safetensors", *options) == 0
    assert _run(prefixed, tmp_path / "model.pt", *options) == 0
    expected = {"a.weight": torch.ones(2), "b": torch.zeros(3), "seen": torch.ones(1)}
    _assert_equal(load_file(tmp_path / "model.safetensors"), expected)
    _assert_equal(torch.load(tmp_path / "model.pt"), expected)
    torch.save(torch.load(tmp_path / "model.pt") | {"net.c": torch.ones(4)}, tmp_path / "more.pt")
    assert _run(tmp_path / "more.pt", tmp_path / "folder", "--strip-prefix", prefix) == 0
    loaded = {"c": torch.zeros(4)}
    dcp.load(loaded, checkpoint_id=tmp_path / "folder", no_dist=True)
    _assert_equal(loaded, {"c": torch.ones(4)})


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_prefix_without_match_is_an_error(
    prefixed: Path, tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"net.a": torch.ones(1), "a": torch.ones(1), "b": torch.ones(1)}
    colliding = tmp_path / "colliding"
    dcp.save(state, checkpoint_id=colliding, no_dist=True)
    for source, options, said in (
        (
            prefixed,
            ("--key", "state_dict"),
            "no name starts with 'net.a.weights.'; names include net.a.weight",
        ),
        (prefixed, (), "no name starts with 'net.a.weights.'; names include "),
        (colliding, (), "no name starts with 'net.a.weights.'; names include "),
    ):
        with pytest.raises(SystemExit):
            _run(source, tmp_path / f"x{suffix}", *options, "--strip-prefix", "net.a.weights")
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        _run(colliding, tmp_path / f"x{suffix}", "--strip-prefix", "net.")
    assert (
        "without the prefix 'net.', 'net.a' and 'a' have the same name" in capsys.readouterr().err
    )
    assert not (tmp_path / f"x{suffix}").exists()


def test_impossible_conversions_are_refused(
    checkpoint: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = checkpoint
    empty, text = tmp_path / "empty", tmp_path / "text.pt"
    empty.mkdir()
    text.write_text("no zip")
    tensors, quaternions = tmp_path / "tensors.pt", tmp_path / "quaternions"
    torch.save([torch.ones(2)], tensors)
    numbers = tmp_path / "numbers.pt"
    torch.save({7: torch.ones(2)}, numbers)
    clashing = tmp_path / "clashing.pt"
    torch.save({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, clashing)
    dcp.save({"q": torch.ones(2, dtype=torch.complex128)}, checkpoint_id=quaternions, no_dist=True)
    bad = [
        ((folder, tmp_path / "x.bin"), "must end in one of .pt"),
        ((text, tmp_path / "x.safetensors"), "a checkpoint, which is a folder"),
        ((folder, tmp_path / "x.safetensors"), "only tensors"),
        ((folder, tmp_path / "x.pt", "--key", "nothing"), "model, note, optim"),
        ((folder, text), "already exists"),
        ((tmp_path / "missing", tmp_path / "x.pt"), "does not exist; pass"),
        ((empty, tmp_path / "x.pt"), "not a checkpoint"),
        ((text, tmp_path / "x"), "cannot be read: "),
        ((folder, text / "x.pt"), f"{text / 'x.pt'}: cannot be written from {folder}: FileExists"),
        ((tensors, tmp_path / "x"), "holds a list, not a state dict"),
        ((numbers, tmp_path / "x", "--strip-prefix", "net"), "no name starts with 'net.'"),
        ((clashing, tmp_path / "x"), "ValueError: duplicated flatten key a.b"),
        (
            (quaternions, tmp_path / "x.safetensors"),
            "'q' is torch.complex128, which safetensors cannot store",
        ),
    ]
    for arguments, said in bad:
        with pytest.raises(SystemExit) as stopped:
            _run(*arguments)
        assert stopped.value.code == 2
        assert said in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "clashing.pt",
        "empty",
        "numbers.pt",
        "quaternions",
        "tensors.pt",
        "text.pt",
    ]


def test_full_disk_is_found_before_writing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # 8 bytes of tensors; a file also needs scratch space.
    state = {"w": torch.ones(1), "more": [{"v": torch.ones(1)}]}
    dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    torch.save(state, tmp_path / "saved.pt")
    for source, target, needed in (("saved", "x.pt", 16), ("saved.pt", "x", 8)):
        disk = shutil.disk_usage(tmp_path)
        with (
            mock.patch("shutil.disk_usage", return_value=disk._replace(free=needed - 1)),
            pytest.raises(SystemExit),
        ):
            _run(tmp_path / source, tmp_path / target)
        said = f"{target}: writing the tensors of {tmp_path / source} takes 0.0 GB of disk space"
        assert said in capsys.readouterr().err
        with mock.patch("shutil.disk_usage", return_value=disk._replace(free=needed)):
            assert _run(tmp_path / source, tmp_path / target) == 0


def test_lists_under_key_stay_lists(tmp_path: Path) -> None:
    moments = [{"step": torch.ones(2)}, {"step": torch.zeros(3)}]
    tensors = [torch.ones(2), torch.zeros(3)]
    state = {"ema": tensors, "optim": moments, "model": {"w": torch.ones(4)}}
    dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    for key, value in state.items():
        assert _run(tmp_path / "saved", tmp_path / f"{key}.pt", "--key", key) == 0
        _assert_equal(torch.load(tmp_path / f"{key}.pt"), value)
