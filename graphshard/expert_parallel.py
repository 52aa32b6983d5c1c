"""Meshes for expert parallelism: experts are split over "ep", then sharded over "efsdp".

Each rank has its own data; ranks along "efsdp" have the same experts.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ._torch.dtensor import flattened, local_tensor

AXES = ("efsdp", "ep")


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return both ``AXES`` of a mesh as one, for parameters other than experts."""
    return flattened(mesh[AXES], "dp")


def overrides(model: nn.Module, mesh: DeviceMesh) -> dict[str, dict[str, Any]]:
    """Return ``overrides`` that shard the parameters split over "ep" over "efsdp".

    If the ranks of "efsdp" do not divide the experts of a rank, the next dimension is sharded.
    """
    efsdp = mesh["efsdp"]
    return {
        fqn: {"mesh": efsdp, "dim": int(local_tensor(param).shape[0] % efsdp.size() > 0)}
        for fqn, param in model.named_parameters()
        if isinstance(param, DTensor)
    }
