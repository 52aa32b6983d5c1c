"""Lazy tensors: shape and dtype are known, and rows are read from a file on demand.

    StoredTensor.create(meta, read)    shape and dtype, and a function that reads rows
    c = torch.cat([a, b], 1)           computes nothing: c records the operator and its arguments
    read_stored(c, slice(2, 4))        reads rows 2 and 3 of a and b, and runs the operator on them

Code that casts, fuses or splits the tensors of a checkpoint out of place runs unchanged. In most
calls of the operators in ``_BY_ROWS``, each rank reads only the data that its rows of the result
need; for any other call, it reads the arguments in full.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeAlias

import torch

from .._torch.tensors import OpOverload, tree_map, writes_arguments

aten = torch.ops.aten
# Function that reads a slice of a tensor's rows, or all of it for None, into host memory.
Read: TypeAlias = Callable[[slice | None], torch.Tensor]


class StoredTensor(torch.Tensor):
    """A tensor on the meta device whose values can be read.

    Operators on stored tensors return stored tensors, or raise NotImplementedError if they write to
    any argument.

    Attributes:
        meta: plain tensor on the meta device.
        origin: function that reads the tensor, or operator call that computes it.
    """

    meta: torch.Tensor
    origin: Read | _Call

    @staticmethod
    def create(meta: torch.Tensor, origin: Read | _Call) -> StoredTensor:
        stored = meta.as_subclass(StoredTensor)
        stored.meta, stored.origin = meta, origin
        return stored

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares no classmethod
        cls, op: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if writes_arguments(op):
            raise NotImplementedError(
                f"{op} writes to its arguments, but an argument is still in its file: use an "
                "out-of-place operator"
            )
        call = _Call(op, args, kwargs or {}, 0)
        metas, keywords = _with(attrgetter("meta"), (args, call.kwargs))
        result = op(*metas, **keywords)
        if isinstance(result, torch.Tensor):
            return cls.create(result, call)
        return type(result)(
            cls.create(one, _Call(op, args, call.kwargs, i)) for i, one in enumerate(result)
        )


@dataclass(frozen=True, eq=False)
class _Call:
    """An operator call, and the number of the output that a stored tensor stands for."""

    op: OpOverload
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    output: int

    def run(self, read: Callable[[StoredTensor], torch.Tensor]) -> torch.Tensor:
        """Run the call on the host, on the values that ``read`` returns for its stored tensors."""
        # Without device="meta", the result is on the device of the values.
        kwargs = {k: v for k, v in self.kwargs.items() if v != torch.device("meta")}
        result = self.op(*_with(read, self.args), **_with(read, kwargs))
        return result if isinstance(result, torch.Tensor) else result[self.output]

    def argument(self, position: int, default: Any) -> Any:
        # ``__torch_dispatch__`` gets all but keyword-only arguments by position.
        return self.args[position] if position < len(self.args) else default

    def dim(self, position: int, ndim: int) -> int:
        return int(self.argument(position, 0)) % ndim  # dims may be negative


def _with(convert: Callable[[StoredTensor], torch.Tensor], values: Any) -> Any:
    return tree_map(lambda v: convert(v) if isinstance(v, StoredTensor) else v, values)


def read_stored(stored: StoredTensor, rows: slice | None = None) -> torch.Tensor:
    """Return ``rows`` (a slice with step 1) of a stored tensor, or all of it, in host memory."""
    if rows is not None:
        start, stop, _ = rows.indices(stored.shape[0])
        rows = slice(start, max(start, stop))
        if stop <= start:
            return torch.empty((0, *stored.shape[1:]), dtype=stored.dtype, device="cpu")
    origin = stored.origin
    if not isinstance(origin, _Call):
        return origin(rows)
    # Functions in _BY_ROWS compute rows of the result from rows of the arguments. For all other
    # operators, the arguments are read in full and the result is sliced.
    if rows is not None and (by_rows := _BY_ROWS.get(origin.op)) is not None:
        result = by_rows(origin, rows)
        if result is not None:
            return result
    full = origin.run(read_stored)
    return full if rows is None else full[rows]


# --- operators whose rows can be computed from rows of the arguments -----------------------------
# Each function returns rows of a call's result, or None if rows of the arguments do not suffice.


def _same_rows(call: _Call, rows: slice) -> torch.Tensor:
    """Run a call whose result rows depend only on the same rows of its arguments."""
    return call.run(lambda stored: read_stored(stored, rows))


def _rows_of_stack(call: _Call, rows: slice) -> torch.Tensor:
    tensors = call.args[0]
    if call.dim(1, tensors[0].dim() + 1) > 0:
        return _same_rows(call, rows)
    return torch.stack([read_stored(tensor) for tensor in tensors[rows]])


def _rows_of_cat(call: _Call, rows: slice) -> torch.Tensor:
    tensors = call.args[0]
    # ``torch.cat`` skips empty vectors, whatever the other tensors' dimensions.
    if call.dim(1, max(tensor.dim() for tensor in tensors)) > 0:
        return _same_rows(call, rows)
    parts, start = [], 0
    for tensor in tensors:
        stop = start + tensor.shape[0]
        if start < rows.stop and rows.start < stop:
            own = slice(max(rows.start - start, 0), min(rows.stop, stop) - start)
            parts.append(read_stored(tensor, own))
        start = stop
    return torch.cat(parts)


def _rows_of_split(call: _Call, rows: slice) -> torch.Tensor:
    tensor, sizes = call.args[0], call.args[1]
    if call.dim(2, tensor.dim()) > 0:
        return _same_rows(call, rows)
    # One size for all parts, or one for each.
    start = sizes * call.output if isinstance(sizes, int) else sum(sizes[: call.output])
    return read_stored(tensor, slice(start + rows.start, start + rows.stop))


def _rows_of_slice(call: _Call, rows: slice) -> torch.Tensor | None:
    tensor = call.args[0]
    if call.dim(1, tensor.dim()) > 0:
        return _same_rows(call, rows)
    if call.argument(4, 1) != 1:
        return None
    given = slice(call.argument(2, None), call.argument(3, None))
    start, _, _ = given.indices(tensor.shape[0])
    return read_stored(tensor, slice(start + rows.start, start + rows.stop))


def _rows_of_transpose(call: _Call, rows: slice) -> torch.Tensor | None:
    ndim = call.args[0].dim()
    moved = {call.dim(1, ndim), call.dim(2, ndim)}
    return None if moved != {0} and 0 in moved else _same_rows(call, rows)


def _rows_of_view(call: _Call, rows: slice) -> torch.Tensor | None:
    tensor, shape = call.args[0], call.args[1]
    if tensor.dim() == 0 or not shape or tensor.shape[0] != shape[0]:
        return None
    own = read_stored(tensor, rows)
    return own.reshape(own.shape[0], *shape[1:])


_BY_ROWS: dict[OpOverload, Callable[[_Call, slice], torch.Tensor | None]] = {
    aten.alias.default: _same_rows,
    aten.detach.default: _same_rows,
    aten.clone.default: _same_rows,
    aten._to_copy.default: _same_rows,
    aten.stack.default: _rows_of_stack,
    aten.cat.default: _rows_of_cat,
    aten.split.Tensor: _rows_of_split,
    aten.split_with_sizes.default: _rows_of_split,
    aten.slice.Tensor: _rows_of_slice,
    aten.transpose.int: _rows_of_transpose,
    aten.view.default: _rows_of_view,
    aten._unsafe_view.default: _rows_of_view,
}
