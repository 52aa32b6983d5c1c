"""``p.data = x`` on a sharded parameter: its shard takes this rank's rows of x, at once.

Sharpness-aware optimizers, weight clamping and averages swap values so. As for a plain parameter,
what ``p.data`` returned before keeps the old values, and so does a forward whose backward is to
come: the parameter gets another shard. The value is copied: x and p share no memory.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from .._torch.dtensor import local_tensor, replace_data
from ..errors import BackendError
from .layout import Layout
from .sharded_param import sharded_param_of


@torch.no_grad()
def assign_data(dtensor: DTensor, value: object) -> bool:
    """Split ``value`` like ``dtensor`` if that is a sharded parameter; return whether it is.

    A DTensor with other placements is redistributed, by a collective.

    Raises:
        BackendError: ``value`` has another shape, or another mesh.
    """
    sharded_param = sharded_param_of(dtensor)
    if sharded_param is None or not isinstance(value, torch.Tensor):
        return False
    if not sharded_param.is_attached_to(dtensor):
        return False
    layout, dtype = sharded_param.layout, dtensor.dtype
    if (fault := _fault(value, layout)) is not None:
        raise BackendError(
            f"the data of parameter {sharded_param.fqn!r} cannot be assigned: {fault}. Give a full "
            "tensor that is equal on all ranks, or a DTensor on the parameter's mesh"
        )
    padded = _own_rows(value, layout, local_tensor(dtensor).device)
    replace_data(dtensor, layout.dtensor(padded))
    sharded_param.attach(dtensor)
    if dtensor.dtype != dtype:
        sharded_param.refresh_accessors()
    return True


def _fault(value: torch.Tensor, layout: Layout) -> str | None:
    if value.shape != layout.shape:
        return f"the value has the shape {tuple(value.shape)} instead of {tuple(layout.shape)}"
    if isinstance(value, DTensor) and value.device_mesh != layout.mesh:
        return f"the value is on {value.device_mesh} instead of {layout.mesh}"
    return None


def _own_rows(value: torch.Tensor, layout: Layout, device: torch.device) -> torch.Tensor:
    """Return a copy of this rank's rows of ``value``, padded."""
    if isinstance(value, DTensor):
        own = local_tensor(value.redistribute(placements=layout.placements))
    else:
        own = (value if layout.rows is None else value[layout.own_rows]).to(device)
    return own.clone() if layout.rows is None else layout.padded(own)
