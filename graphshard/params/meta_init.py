"""Initialize a sharded model whose parameters are on the meta device.

``fill`` takes full tensors, in memory or in files, and each rank copies only its rows.
``materialize`` calls the model's or the user's initialization, with a few real parameters per call:

    shard(model)             DTensors on the meta device
    init(model), pass 1      the first few parameters are plain, full and real, the rest on the meta
                             device ─► each rank keeps its rows of the first few
    init(model), pass 2      the next few parameters are real ...

``init`` sees plain parameters: unlike on DTensors, writes to single rows, ``p.data`` and random
numbers work as in the unsharded model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from .._torch.dtensor import local_tensor, values_on_rank
from .._torch.nn import buffers_of, parameters_of, replace_parameters
from ..errors import BackendError
from ..ranks.agree import broadcast_from_rank
from .full_tensor import as_bytes
from .mesh import MeshGroups
from .module_class import plain_class
from .param_spec import ParamSpec
from .sharded_param import is_offloaded, sharded_param_of, user_attributes
from .stored import StoredTensor, read_stored
from .trained_module import checked_module, mesh_groups_of
from .uninitialized import mark_uninitialized, num_uninitialized

Init = Callable[[nn.Module], object]
T = TypeVar("T")
INITIALIZED = "_is_hf_initialized"  # marks tensors that transformers must not initialize
_MARK = 0x55  # each byte of an unwritten integer or bool; a written bool is 0 or 1


def materialize(model: nn.Module, init: Init | None = None) -> None:
    """Allocate and initialize a sharded model whose parameters are on the meta device.

    All ranks of the mesh must call this. Each rank computes full parameters and keeps its rows of
    them, so values depend on ``torch.manual_seed`` of the mesh's first rank, but not on the number
    of ranks. Tensors not on the meta device keep their values, but ``init`` may change buffers.

    Args:
        model: model sharded by :func:`graphshard.shard`.
        init: function that initializes the model it is passed. It may be called several times; in
            each call, some parameters are plain and real, and all others are on the meta device, so
            it cannot compute one parameter from another. By default, ``model.init_weights()`` if
            the model has that method, otherwise ``reset_parameters()`` or ``_reset_parameters()``
            of every module that has one of them, children before their parents.

    Raises:
        ValueError: the model is not sharded; a parameter differs between ranks (experts that were
            not DTensors before sharding); or ``init`` replaces a parameter by one of another shape
            or on the meta device, leaves part of a parameter or buffer unwritten, or reads a
            parameter that is on the meta device. The model then stays on the meta device.
    """
    root = checked_module(model, allow_meta=True)
    groups = mesh_groups_of(root)
    if groups is None:
        raise BackendError(f"{type(root).__name__} is not sharded: call graphshard.shard first")
    names = [name for name, param in root.named_parameters() if param.is_meta]
    # Only the first rank's seed is used, but every rank draws one: all generators advance equally.
    seed = broadcast_from_rank(int(torch.randint(2**48, ())), 0, groups.all_ranks)
    allocate(root, groups)
    snapshots = [_Snapshot.take(module) for module in root.modules()]
    try:
        for number, part in enumerate(_passes(root, names)):
            with _seeded(seed + number, groups.device):
                _init_some(root, part, snapshots, init or _own_init, groups.device)
        _check_buffers(snapshots)
    except BaseException:
        for snapshot in snapshots:
            snapshot.restore_attributes()
        allocated = {root.get_parameter(name) for name in names}
        replace_parameters(
            root, lambda p: torch.empty_like(p, device="meta") if p in allocated else p
        )
        raise


def allocate(root: nn.Module, groups: MeshGroups) -> None:
    """Replace parameters on the meta device with uninitialized ones on the device of the mesh.

    Offloaded parameters are allocated on the host instead.
    """

    def allocated(param: nn.Parameter) -> torch.Tensor:
        if not param.is_meta:
            return param
        return torch.empty_like(param, device="cpu" if is_offloaded(param) else groups.device)

    replace_parameters(root, allocated)


def _passes(root: nn.Module, names: Sequence[str]) -> Iterator[list[str]]:
    sizes = {name: root.get_parameter(name).nbytes for name in names}
    # All parameters of a pass are full-size at once, and every pass runs ``init`` on the whole
    # model. A pass may be as large as the largest module, which must fit anyway, or as 1/16 of the
    # model up to 1 GiB; otherwise a deep model of small modules would need one pass per module.
    largest = max(sum(p.nbytes for p in m.parameters(recurse=False)) for m in root.modules())
    limit = max(largest, min(sum(sizes.values()) // 16, 1 << 30))
    part: list[str] = []
    size = 0
    for name in names:
        if part and size + sizes[name] > limit:
            yield part
            part, size = [], 0
        part.append(name)
        size += sizes[name]
    yield part


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    # fork_rng restores the generators of the host and of the device on exit.
    devices = [] if device.type == "cpu" else [device]
    kind = device.type if devices else "cuda"
    with torch.random.fork_rng(devices, device_type=kind), torch.no_grad():
        torch.manual_seed(seed)
        yield


@dataclass(frozen=True)
class _Snapshot:
    module: nn.Module
    kind: type[nn.Module]
    attributes: dict[str, Any]  # contents of its ``__dict__``
    parameters: dict[str, nn.Parameter | None]
    buffers: dict[str, torch.Tensor | None]

    @staticmethod
    def take(module: nn.Module) -> _Snapshot:
        parameters, buffers = parameters_of(module), buffers_of(module)
        return _Snapshot(module, type(module), dict(vars(module)), dict(parameters), dict(buffers))

    def make_plain(self, twins: Mapping[nn.Parameter, nn.Parameter], device: torch.device) -> None:
        """Switch the module to its plain class and parameters, and allocate its meta buffers."""
        self.restore_attributes()
        self.module.__class__ = plain_class(self.module)
        parameters_of(self.module).update(
            {name: p if p is None else twins[p] for name, p in self.parameters.items()}
        )
        metas = {name: b for name, b in self.buffers.items() if b is not None and b.is_meta}
        buffers_of(self.module).update({name: _marked(b, device) for name, b in metas.items()})

    def restore_parameters(self) -> None:
        self.module.__class__ = self.kind
        _refill(parameters_of(self.module), self.parameters)

    def restore_attributes(self) -> None:
        _refill(vars(self.module), self.attributes)
        _refill(buffers_of(self.module), self.buffers)


def _refill(values: dict[str, T], before: Mapping[str, T]) -> None:
    values.clear()  # in place: the module keeps its dicts
    values.update(before)


def _init_some(
    root: nn.Module,
    names: Sequence[str],
    snapshots: Sequence[_Snapshot],
    init: Init,
    device: torch.device,
) -> None:
    """Run ``init`` with the parameters ``names`` real, and keep this rank's rows of them."""
    shards = {name: root.get_parameter(name) for name in names}
    real = set(shards.values())
    twins = {p: plain_twin(p, device if p in real else None) for p in root.parameters()}
    for snapshot in snapshots:
        snapshot.make_plain(twins, device)
    try:
        _run(init, root)
        # By name: init may have replaced a parameter, which _check_written reports.
        full = {name: root.get_parameter(name).detach() for name in names}
    finally:
        for snapshot in snapshots:
            snapshot.restore_parameters()
    for name, shard in shards.items():
        _check_written(name, full[name], shard)
        values, sharded = full.pop(name), sharded_param_of(shard)
        if sharded is None:
            shard.detach().copy_(values)
        else:
            local_tensor(sharded.dtensor).copy_(values[sharded.spec.part])


def plain_twin(param: nn.Parameter, device: torch.device | None) -> nn.Parameter:
    """Return a plain, full-size parameter with the attributes that users set on ``param``.

    It is uninitialized, on ``device`` or, for None, on the meta device.
    """
    place = torch.device("meta") if device is None else device
    empty = torch.empty(param.shape, dtype=param.dtype, device=place)
    _mark(empty)
    twin = nn.Parameter(empty, requires_grad=param.requires_grad)
    vars(twin).update(user_attributes(param))
    vars(twin).pop(INITIALIZED, None)
    return twin


def _run(init: Init, root: nn.Module) -> None:
    try:
        init(root)
    except (NotImplementedError, RuntimeError) as error:
        if not re.search(r"\bmeta\b", str(error)):  # the model's own error
            raise
        raise BackendError(
            "init reads a parameter, or computes one from another: it may only write parameters, "
            f"because most of them are on the meta device, without values ({error}). By default, "
            "init calls the model's init_weights() or its modules' reset_parameters()"
        ) from error


def _own_init(root: nn.Module) -> None:
    if callable(init_weights := getattr(root, "init_weights", None)):
        init_weights()
        return
    for module in _children_first(root, set()):
        names = ("reset_parameters", "_reset_parameters")
        resets = [getattr(module, name) for name in names if hasattr(module, name)]
        if resets:
            resets[0]()


# Parents may overwrite the values of their children, as nn.Transformer and others do.
def _children_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    if module not in seen:
        seen.add(module)
        for child in module.children():
            yield from _children_first(child, seen)
        yield module


def _check_written(name: str, full: torch.Tensor, param: nn.Parameter) -> None:
    if full.is_meta or full.shape != param.shape:
        raise BackendError(
            f"init replaced {name!r} of shape {tuple(param.shape)} with a parameter of shape "
            f"{tuple(full.shape)} on {full.device}: write values into the existing parameter"
        )
    if unwritten := _num_unwritten(full):
        raise BackendError(
            f"init does not write {unwritten} of the {full.numel()} elements of {name!r}: "
            "pass graphshard.materialize a function init(model) that writes all parameters"
        )


def _marked(meta: torch.Tensor, device: torch.device) -> torch.Tensor:
    buffer = torch.zeros_like(meta, device=device, memory_format=torch.contiguous_format)
    _mark(values_on_rank(buffer))
    return buffer


def _mark(values: torch.Tensor) -> None:
    """Mark all elements of a contiguous tensor as unwritten, unless they are 8-bit floats."""
    if not mark_uninitialized(values) and not values.is_floating_point():
        as_bytes(values).fill_(_MARK)


def _num_unwritten(tensor: torch.Tensor) -> int:
    """Return the number of marked elements; of short integers, only if all are marked."""
    values = values_on_rank(tensor).contiguous()
    if values.is_floating_point() or values.is_complex():
        return num_uninitialized(values)
    elements = as_bytes(values).view(-1, values.itemsize)
    unwritten = int((elements == _MARK).all(1).sum())
    # A table of all 8-bit or 16-bit values contains the mark.
    may_contain_mark = values.itemsize <= 2 and values.dtype != torch.bool
    return 0 if may_contain_mark and unwritten < values.numel() else unwritten


def _check_buffers(snapshots: Sequence[_Snapshot]) -> None:
    for snapshot in snapshots:
        for name, buffer in buffers_of(snapshot.module).items():
            before = snapshot.buffers.get(name)
            was_meta = before is not None and before.is_meta
            if not was_meta or buffer is None:
                continue
            if buffer.is_meta or _num_unwritten(buffer):
                raise BackendError(
                    f"init does not write the buffer {name!r} of {type(snapshot.module).__name__}: "
                    "pass graphshard.materialize a function init(model) that does, or create "
                    "constant buffers outside of torch.device('meta')"
                )


# --- from known values ---------------------------------------------------------------------------


def fill(root: nn.Module, values: Mapping[str, torch.Tensor], groups: MeshGroups) -> None:
    """Allocate a sharded model's meta parameters, and write this rank's rows of ``values``.

    Args:
        values: full tensors keyed by the first name of every parameter, in memory or still in files
            (``StoredTensor``).
    """
    allocate(root, groups)
    with torch.no_grad():
        for name, param in root.named_parameters():
            sharded = sharded_param_of(param)
            assert sharded is not None, f"{name} is not sharded"
            # Reads this rank's rows, or the whole parameter if rows cannot be read separately.
            local_tensor(sharded.dtensor).copy_(_part_of(values[name], sharded.spec))


def _part_of(full: torch.Tensor, spec: ParamSpec) -> torch.Tensor:
    if not isinstance(full, StoredTensor):
        return full[spec.part]
    if not spec.part:  # a scalar
        return read_stored(full)
    rows, *others = spec.part
    return read_stored(full, rows)[(slice(None), *others)]
