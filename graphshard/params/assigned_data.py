"""``p.data = x`` on a sharded parameter: give it a new shard with this rank's rows of ``x``.

Sharpness-aware optimizers, weight clamping and weight averaging swap values like this. As with a
plain parameter, the old values stay valid for tensors that ``p.data`` returned before, and for a
forward whose backward has yet to run. Unlike with a plain parameter, ``x`` is copied: it shares no
memory with ``p``.
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
    """Assign this rank's rows of ``value`` to a sharded parameter.

    A DTensor ``value`` with other placements is redistributed, which is a collective.

    Returns:
        False, with nothing done, unless ``dtensor`` is a sharded parameter and ``value`` a tensor.

    Raises:
        BackendError: ``value`` has another shape, or is on another mesh.
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
    padded = _local_rows(value, layout, local_tensor(dtensor).device)
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


def _local_rows(value: torch.Tensor, layout: Layout, device: torch.device) -> torch.Tensor:
    """Return a padded copy of this rank's rows of ``value``."""
    if isinstance(value, DTensor):
        own = local_tensor(value.redistribute(placements=layout.placements))
    else:
        own = (value if layout.rows is None else value[layout.local_rows]).to(device)
    return own.clone() if layout.rows is None else layout.padded(own)
