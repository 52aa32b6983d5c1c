"""Lazily read tensors: rows of operator results, and the number of rows read from the file."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from graphshard.params.stored import StoredTensor, read_stored

ROWS = 6


class _File:
    def __init__(self) -> None:
        rng = torch.Generator().manual_seed(0)
        self.tensors = [torch.randn(ROWS, 4, 2, generator=rng) for _ in range(2)]
        self.num_read = 0

    def stored(self) -> list[StoredTensor]:
        return [StoredTensor.create(t.to("meta"), self._reader(t)) for t in self.tensors]

    def _reader(self, tensor: Tensor) -> Callable[[slice | None], Tensor]:
        def read(rows: slice | None) -> Tensor:
            found = tensor if rows is None else tensor[rows]
            self.num_read += found.shape[0]
            return found

        return read


BY_ROWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "unchanged": lambda a, b: a[...],
    "cast": lambda a, b: a.to(torch.bfloat16).contiguous(),
    "concatenated columns": lambda a, b: torch.cat([a, b], dim=1),
    "concatenated rows": lambda a, b: torch.cat([a, b]),
    "chunk of rows": lambda a, b: torch.chunk(a, 3)[1].contiguous(),
    "chunk of columns": lambda a, b: torch.chunk(torch.cat([a, b], dim=-1), 2, dim=-1)[1],
    "split of rows": lambda a, b: torch.split(a, [1, 3, 2])[1],
    "part of rows": lambda a, b: a[1:5],
    "transposed columns": lambda a, b: a.transpose(1, 2).contiguous(),
    "flattened columns": lambda a, b: a.reshape(ROWS, 8),
    "interleaved columns": lambda a, b: a.reshape(ROWS, 2, 2, 2).transpose(1, 2).reshape(ROWS, 8),
}
"""Functions that read only the requested number of rows of each argument."""

OF_EXPERTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "stacked": lambda a, b: torch.stack([a, b]),
    "stacked and fused": lambda a, b: torch.cat([torch.stack([a, b]), torch.stack([b, a])], dim=1),
}

WHOLE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "permuted for rope": lambda a, b: a.view(2, 3, 4, 2).transpose(1, 2).reshape(ROWS, 8),
    "transposed rows": lambda a, b: a.transpose(0, 1),
    "every other row": lambda a, b: a[::2],
    "row of a row": lambda a, b: a[:, 2],
    "sum": lambda a, b: a + b,
}
OTHERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "concatenated with an empty vector": lambda a, b: torch.cat([a[:0, 0, 0], a, b], dim=1),
}
CASES = BY_ROWS | OF_EXPERTS | WHOLE | OTHERS


@pytest.mark.parametrize("name", CASES)
def test_rows_of_stored_result_equal_rows_of_full_result(name: str) -> None:
    file = _File()
    expected, stored = CASES[name](*file.tensors), CASES[name](*file.stored())
    assert isinstance(stored, StoredTensor) and file.num_read == 0
    assert (stored.shape, stored.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(read_stored(stored), expected)
    for start in range(len(expected) + 1):
        for stop in range(len(expected) + 1):
            rows = read_stored(stored, slice(start, stop))
            assert torch.equal(rows, expected[start:stop]) and rows.dtype == expected.dtype


@pytest.mark.parametrize("name", BY_ROWS)
def test_only_requested_rows_are_read(name: str) -> None:
    file = _File()
    arguments = {"concatenated columns": 2, "chunk of columns": 2}.get(name, 1)
    read_stored(BY_ROWS[name](*file.stored()), slice(1, 2))
    assert file.num_read == arguments


@pytest.mark.parametrize("name", OF_EXPERTS)
def test_only_requested_experts_are_read(name: str) -> None:
    file = _File()
    experts = OF_EXPERTS[name](*file.stored())
    read_stored(experts, slice(1, 2))
    assert file.num_read == ROWS * experts.shape[1] // ROWS


def test_scalars_and_empty_tensors_are_read() -> None:
    for tensor in (torch.tensor(3.0), torch.zeros(0, 3)):
        stored = StoredTensor.create(tensor.to("meta"), lambda rows, tensor=tensor: tensor)
        assert torch.equal(read_stored(stored.to(torch.float64)), tensor.double())


def test_writing_to_stored_tensor_raises() -> None:
    with pytest.raises(NotImplementedError, match="still in its file"):
        _File().stored()[0].zero_()
