"""Fill a sharded meta-device model with known values: each rank reads only its rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from .._torch.dtensor import local_tensor
from .materialize import allocate
from .mesh import MeshGroups
from .sharded_param import sharded_param_of
from .stored import StoredTensor, read_stored


def fill(root: nn.Module, values: Mapping[str, torch.Tensor], groups: MeshGroups) -> None:
    """Allocate the parameters of a sharded model, and write this rank's rows into its shards.

    Communicates nothing. Apart from the shards it allocates one parameter's rows at a time, or a
    whole tensor if its rows cannot be read separately.

    Args:
        values: full tensors, in memory or still in files (``StoredTensor``), by the first name of
            every parameter.
    """
    allocate(root, groups)
    with torch.no_grad():
        for name, param in root.named_parameters():
            sharded = sharded_param_of(param)
            assert sharded is not None, f"{name} is not sharded"
            spec = sharded.spec
            rows = None if spec.rows is None else spec.local_rows
            local_tensor(sharded.dtensor).copy_(_rows_of(values[name], rows))


def _rows_of(full: torch.Tensor, rows: slice | None) -> torch.Tensor:
    if isinstance(full, StoredTensor):
        return read_stored(full, rows)
    return full if rows is None else full[rows]
