"""DTensors, made and taken apart without the cost of ``from_local`` and ``to_local``.

Read in torch/distributed/tensor/_api.py and _dtensor_spec.py.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta


def local_tensor(dtensor: DTensor) -> torch.Tensor:
    """Return the local tensor itself (``to_local()`` makes another view at each call)."""
    return dtensor._local_tensor


def set_local_tensor(dtensor: DTensor, local: torch.Tensor) -> None:
    """Replace the local tensor, as FSDP2's ``reset_sharded_param`` does (_fsdp_param.py)."""
    dtensor._local_tensor = local


def dtensor_like(local: torch.Tensor, like: DTensor) -> DTensor:
    """Make a DTensor of ``local`` with the shape and placements of ``like``."""
    return DTensor(local, like._spec, requires_grad=False)


def dtensor_of(
    local: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size
) -> DTensor:
    """Make a contiguous DTensor of the full ``shape`` with this local tensor.

    ``DTensor.from_local`` would move a local tensor that the host keeps to the mesh's device.
    """
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), local.dtype)
    return DTensor(local, DTensorSpec(mesh, placements, tensor_meta=meta), requires_grad=False)
