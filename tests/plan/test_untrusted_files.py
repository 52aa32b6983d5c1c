"""`consolidate` of damaged and malicious files.

Every failure is a ValueError that names the file and leaves no target file. Code in a file is never
run, and no other file is written.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from graphshard.tools.consolidate import consolidate

FORMS = ["folder", "model.safetensors", "model.pt"]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
EXAMPLES = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": {"c": torch.ones(3, dtype=torch.bfloat16)}}
    dcp.save({"model": tensors}, checkpoint_id=folder / "tensors", no_dist=True)
    consolidate(folder / "tensors", folder / "model.safetensors", key="model")
    dcp.save({"model": tensors, "note": "text"}, checkpoint_id=folder / "folder", no_dist=True)
    consolidate(folder / "folder", folder / "model.pt")
    return folder


@pytest.fixture
def place(good: Path, tmp_path: Path) -> Path:
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    return tmp_path


def _files(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def _try(place: Path, form: str) -> ValueError | None:
    """Consolidate, and return the error, if any.

    Check that an error names the file, and that no file except the target changed.
    """
    before, error = _files(place), None
    target = place / "out" / ("made" if "." in form else "made.pt")
    try:
        consolidate(place / form, target)
    except ValueError as raised:
        error = raised
        assert str(place / form) in str(error)
        assert not target.exists()
    made = _files(place / "out") if (place / "out").exists() else {}
    shutil.rmtree(place / "out", ignore_errors=True)
    assert _files(place) == before
    assert error is not None or made
    return error


def _parts(place: Path, form: str) -> list[Path]:
    return sorted(path for path in [place / form, *(place / form).rglob("*")] if path.is_file())


@pytest.mark.parametrize("form", FORMS)
def test_good_file_is_read(place: Path, form: str) -> None:
    assert _try(place, form) is None


@pytest.mark.parametrize("form", FORMS)
@given(data=st.data())
@EXAMPLES
def test_a_truncated_file_is_an_error(place: Path, form: str, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(_parts(place, form)))
    whole = path.read_bytes()
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    try:
        assert _try(place, form) is not None
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize("form", FORMS)
@given(data=st.data())
@EXAMPLES
def test_changed_bytes_are_an_error_or_change_values(
    place: Path, form: str, data: st.DataObject
) -> None:
    path = data.draw(st.sampled_from(_parts(place, form)))
    whole = path.read_bytes()
    changed = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(changed)
    try:
        _try(place, form)
    finally:
        path.write_bytes(whole)


# Forged checkpoint metadata.


def _metadata(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


def _write(folder: Path, metadata: Any) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _of_a(metadata: Any) -> Any:
    return metadata.state_dict_metadata["model.a"]


def _place_of_a(metadata: Any) -> Any:
    return metadata.storage_data[MetadataIndex("model.a", torch.Size([0, 0]))]


def _negative_offset(metadata: Any) -> None:
    _place_of_a(metadata).offset = -4


def _huge_offset(metadata: Any) -> None:
    _place_of_a(metadata).offset = 1 << 70


def _negative_length(metadata: Any) -> None:
    _place_of_a(metadata).length = -1


def _huge_length(metadata: Any) -> None:
    _place_of_a(metadata).length = 1 << 62


def _no_number(metadata: Any) -> None:
    _place_of_a(metadata).offset = "0"


def _shared_bytes(metadata: Any) -> None:
    other = next(p for i, p in metadata.storage_data.items() if i.fqn == "model.b.c")
    other.offset = _place_of_a(metadata).offset + 8


def _path(path: Any) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        _place_of_a(metadata).relative_path = path

    return change


def _huge_tensor(metadata: Any) -> None:
    _of_a(metadata).size = torch.Size([1 << 40, 3])
    _of_a(metadata).chunks[0].sizes = torch.Size([1 << 40, 3])


def _hole(metadata: Any) -> None:
    _of_a(metadata).size = torch.Size([4, 3])


def _chunk(offsets: list[int], sizes: list[int]) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        _of_a(metadata).chunks.append(chunk)
        place = copy.copy(_place_of_a(metadata))
        metadata.storage_data.setdefault(MetadataIndex("model.a", torch.Size(offsets)), place)

    return change


def _long_list(metadata: Any) -> None:
    metadata.planner_data["note"] = ("model", 1 << 40)


def _two_in_one_path(metadata: Any) -> None:
    metadata.planner_data["note"] = ("model", "a", "b")


def _path_twice(metadata: Any) -> None:
    metadata.planner_data["note"] = ("model", "a")


def _no_path(metadata: Any) -> None:
    metadata.planner_data["note"] = ()


def _missing_value(metadata: Any) -> None:
    del metadata.storage_data[MetadataIndex("note")]


def _other_dtype(metadata: Any) -> None:
    _of_a(metadata).properties.dtype = "float32"


LIES: dict[str, Callable[[Any], None]] = {
    "negative offset": _negative_offset,
    "huge offset": _huge_offset,
    "negative length": _negative_length,
    "huge length": _huge_length,
    "offset that is not a number": _no_number,
    "shared bytes": _shared_bytes,
    "absolute path": _path("/etc/hostname"),
    "path out of the folder": _path("../folder/__0_0.distcp"),
    "path into and out of the folder": _path("x/../../model.pt"),
    "missing file": _path("nothing"),
    "the folder itself": _path("."),
    "null byte in a path": _path("a\0b"),
    "path that is a number": _path(3),
    "huge tensor": _huge_tensor,
    "hole": _hole,
    "overlapping chunks": _chunk([1, 0], [1, 3]),
    "same chunk twice": _chunk([0, 0], [2, 3]),
    "chunk outside": _chunk([2, 0], [1, 3]),
    "chunk with a different number of dims": _chunk([0], [0]),
    "endless list": _long_list,
    "two values in one path": _two_in_one_path,
    "one path twice": _path_twice,
    "value without a path": _no_path,
    "value without a file": _missing_value,
    "dtype that is a string": _other_dtype,
}


@pytest.mark.parametrize("lie", LIES)
def test_forged_metadata_is_an_error(place: Path, lie: str) -> None:
    metadata = _metadata(place / "folder")
    LIES[lie](metadata)
    _write(place / "folder", metadata)
    assert _try(place, "folder") is not None


@pytest.mark.parametrize("value", [None, {}, torch.Size([1]), [1, 2]])
def test_another_pickle_instead_of_metadata_is_an_error(place: Path, value: Any) -> None:
    _write(place / "folder", value)
    assert _try(place, "folder") is not None


# Code in pickles.


class _Code:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def _code_in_metadata(place: Path, code: _Code) -> str:
    metadata = _metadata(place / "folder")
    metadata.planner_data = code
    _write(place / "folder", metadata)
    return "folder"


def _code_as_metadata(place: Path, code: _Code) -> str:
    _write(place / "folder", code)
    return "folder"


def _code_in_a_value(place: Path, code: _Code) -> str:
    shutil.rmtree(place / "folder")
    state = {"model": torch.ones(2), "note": code}
    dcp.save(state, checkpoint_id=place / "folder", no_dist=True)
    return "folder"


def _code_in_a_file(place: Path, code: _Code) -> str:
    torch.save({"model": torch.ones(2), "note": code}, place / "model.pt")
    return "model.pt"


@pytest.mark.parametrize(
    "hide", [_code_in_metadata, _code_as_metadata, _code_in_a_value, _code_in_a_file]
)
def test_code_in_file_is_not_run(place: Path, hide: Callable[[Path, _Code], str]) -> None:
    made = place / "made by code"
    form = hide(place, _Code(made))
    assert _try(place, form) is not None
    assert not made.exists()


_METADATA = "torch.distributed.checkpoint.metadata"
SHARED = {
    "a class": f"c{_METADATA}\nMetadataIndex\n",
    "a member of an enum": f"c{_METADATA}\n_MEM_FORMAT_ENCODING\n(I0\ntR",
    "a function": "ctorch.serialization\n_get_layout\n",
    # Some versions of Python, such as 3.11.2, pickle enum members this way.
    "an attribute of an enum": f"cbuiltins\ngetattr\n(c{_METADATA}\n_MEM_FORMAT_ENCODING\n"
    "S'TORCH_PRESERVE_FORMAT'\ntR",
}


@pytest.mark.parametrize("what", SHARED)
def test_metadata_cannot_change_objects_of_torch(place: Path, what: str) -> None:
    has = SHARED[what].encode()
    changes = has + b"(N(S'planted'\nI1\ndtb"  # like setattr
    (place / "folder" / ".metadata").write_bytes(changes + b".")
    error = _try(place, "folder")
    assert not hasattr(pickle.loads(has + b"."), "planted")
    assert error is not None and "modifies" in str(error)


def test_metadata_cannot_read_attributes_of_other_classes(place: Path) -> None:
    read = f"cbuiltins\ngetattr\n(c{_METADATA}\nMetadataIndex\nS'__init__'\ntR."
    assert callable(pickle.loads(read.encode()))
    (place / "folder" / ".metadata").write_bytes(read.encode())
    assert "refers to '__init__' of" in str(_try(place, "folder"))


def test_values_not_selected_by_key_may_be_unreadable(place: Path) -> None:
    form = _code_in_a_value(place, _Code(place / "made by code"))
    consolidate(place / form, place / "model.pt.pt", key="model")


# Headers of safetensors files.


def _safetensors(header: bytes, length: int | None = None, data: bytes = bytes(24)) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def _entry(**change: Any) -> bytes:
    entry: dict[str, Any] = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    return json.dumps({"a": entry | change}).encode()


def _headers() -> Iterator[bytes]:
    yield from (b"", b"\1" * 5, _safetensors(b"{}", 1 << 63), _safetensors(b"{}", 1000))
    yield from (_safetensors(text) for text in (b"{", b"[]", b"3", b"\xff", b"[" * 100_000))
    yield from (_safetensors(b'{"a": %s}' % text) for text in (b"3", b"{}", b"null"))
    for offsets in ([-24, 0], [24, 0], [8, 32], [0, 25], [0], [0, 12], [0, 1 << 70], ["0", 24]):
        yield _safetensors(_entry(data_offsets=offsets))
    for shape in ([-2, -3], [2, 3, 1.0], [1 << 40, 1 << 40], "6", [True, 6], None):
        yield _safetensors(_entry(shape=shape))
    for dtype in ("F128", 3, None, ["F32"]):
        yield _safetensors(_entry(dtype=dtype))
    yield _safetensors(_entry(), data=bytes(25))
    two = {n: {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]} for n in ("a", "b")}
    yield _safetensors(json.dumps(two).encode())


@pytest.mark.parametrize("number", range(len(list(_headers()))))
def test_forged_header_is_an_error(place: Path, number: int) -> None:
    (place / "model.safetensors").write_bytes(list(_headers())[number])
    assert _try(place, "model.safetensors") is not None


NUMBERS = st.integers(-(1 << 65), 1 << 65) | st.integers(-1, 30)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=5) | st.floats(),
    lambda of: st.lists(of, max_size=3) | st.dictionaries(st.text(max_size=5), of, max_size=3),
    max_leaves=5,
)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BOOL", "U8", "BF16"]) | JSON,
        "shape": st.lists(NUMBERS, max_size=3) | JSON,
        "data_offsets": st.lists(NUMBERS, min_size=2, max_size=2) | JSON,
    }
)


@given(header=st.dictionaries(st.text(max_size=5), ENTRIES | JSON, max_size=3) | JSON)
@EXAMPLES
def test_any_header_is_read_or_an_error(place: Path, header: Any) -> None:
    (place / "model.safetensors").write_bytes(_safetensors(json.dumps(header).encode()))
    _try(place, "model.safetensors")
