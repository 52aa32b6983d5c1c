"""DTensors: their local tensors, placements and meshes, and assignment to ``.data``.

Relies on its imports, torch/distributed/tensor/_api.py and torch/distributed/device_mesh.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from .patches import patch


def attributes_of(param: torch.Tensor) -> dict[str, Any]:
    """Return the attributes of a parameter that were set in Python, except by ``nn.Parameter``."""
    return {name: value for name, value in vars(param).items() if name != "_is_param"}


def local_tensor(dtensor: DTensor) -> torch.Tensor:
    """Return the local tensor itself (``to_local()`` creates a new view on each call)."""
    return dtensor._local_tensor


def values_on_rank(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor, or any other tensor unchanged."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def set_local_tensor(dtensor: DTensor, local: torch.Tensor) -> None:
    """Replace the local tensor, as FSDP2's ``reset_sharded_param`` does (_fsdp_param.py)."""
    dtensor._local_tensor = local


def set_mesh(dtensor: DTensor, mesh: DeviceMesh) -> None:
    """Replace the mesh of ``dtensor`` by an equal one, in place."""
    spec = dtensor._spec
    dtensor._spec = DTensorSpec(mesh, spec.placements, tensor_meta=spec.tensor_meta)


def dtensor_like(local: torch.Tensor, like: DTensor) -> DTensor:
    return DTensor(local, like._spec, requires_grad=False)


def dtensor_of(
    local: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size
) -> DTensor:
    """Wrap ``local`` in a contiguous DTensor of the full ``shape``."""
    # ``DTensor.from_local`` would move an offloaded local tensor to the mesh's device.
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), local.dtype)
    return DTensor(local, DTensorSpec(mesh, placements, tensor_meta=meta), requires_grad=False)


def rows_of_parts(num_parts: int, dim: int) -> Placement:
    """Return the placement that splits ``dim`` into ``num_parts`` blocks and shards each block."""
    # FSDP2 does the same for parameters that tensor parallelism has split (_fsdp_param.py).
    return Shard(dim) if num_parts == 1 else _StridedShard(dim, split_factor=num_parts)


def has_root_of(mesh: DeviceMesh, other: DeviceMesh) -> bool:
    return mesh._get_root_mesh() == other._get_root_mesh()


def slice_equal_to(mesh: DeviceMesh, other: DeviceMesh) -> DeviceMesh | None:
    """Return ``mesh`` as a slice of the root mesh of ``other``, or None if no slice equals it.

    A DTensor's mesh may be a slice of an earlier root mesh: DTensor caches specs by mesh, and
    slices of different root meshes may compare equal.
    """
    if has_root_of(mesh, other):
        return mesh
    names, root = mesh.mesh_dim_names, other._get_root_mesh()
    if names is None or not set(names) <= set(root.mesh_dim_names or ()):
        return None
    own = root[names]
    return own if own == mesh else None


def concatenated(mesh: DeviceMesh, other: DeviceMesh) -> DeviceMesh:
    """Return the mesh with the axes of ``mesh``, then those of ``other``, as in FSDP2.

    Raises:
        RuntimeError: the meshes overlap, or are slices of different meshes.
    """
    return DeviceMesh._concatenate([mesh, other])


def flattened(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return a 1D mesh of the ranks of ``mesh``, with axis ``name`` and the same root mesh."""
    return mesh._flatten(name)


def replace_data(dtensor: DTensor, new: DTensor) -> None:
    """Give ``dtensor`` the local tensor, dtype and placements of ``new``, in place.

    Raises:
        RuntimeError: torch does not accept ``new`` as the data of ``dtensor``.
    """
    _set_data(dtensor, new)
    dtensor._spec = new._spec
    dtensor._local_tensor = new._local_tensor


@functools.cache  # registering ``act`` again has no effect
def on_data_assigned(act: Callable[[DTensor, object], bool]) -> None:
    """Call ``act(dtensor, value)`` on ``dtensor.data = value``.

    If ``act`` returns False, ``dtensor`` then shares the memory of ``value``, as for plain tensors,
    if that is a DTensor. For anything else, torch's assignment runs, and has no effect.
    """

    # Torch's assignment replaces the storage of the wrapper, which holds no memory, instead of the
    # local tensor: the assigned value is lost. Dynamo must not compile this function where Python
    # runs its caller, such as a loop with a graph break.
    @torch.compiler.disable
    def assign(dtensor: DTensor, value: torch.Tensor) -> None:
        if act(dtensor, value):
            return
        if isinstance(value, DTensor):
            replace_data(dtensor, dtensor_like(local_tensor(value).detach(), value))
        else:
            _set_data(dtensor, value)

    patch("torch.distributed.tensor.DTensor.data", lambda data: property(data.__get__, assign))


@functools.cache  # patching again has no effect
def fix_deepcopy() -> None:
    """Let ``copy.deepcopy`` copy a DTensor whose local tensor starts inside a storage."""

    # For example a gradient, a slice of a reduction buffer. Torch takes the wrapper's data pointer,
    # which is then not 0, as a sign that it has memory, and fails to copy that.
    def wrap(deepcopy: Callable[[DTensor, dict[int, Any]], DTensor]) -> Callable[..., DTensor]:
        @functools.wraps(deepcopy)
        def copy(self: DTensor, memo: dict[int, Any]) -> DTensor:
            is_plain = not self.requires_grad and not isinstance(self, torch.nn.Parameter)
            if is_plain and self.data_ptr() != 0:
                memo.setdefault(id(self), self.clone())
            return deepcopy(self, memo)

        return copy

    patch("torch.distributed.tensor.DTensor.__deepcopy__", wrap)


_set_data: Callable[[DTensor, object], None] = torch.Tensor.data.__set__  # type: ignore[attr-defined]
