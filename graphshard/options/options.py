"""The arguments of ``graphshard.backend`` and ``graphshard.shard``, checked before use."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from .._torch.tensors import FakeTensor, unset_fake_temporarily
from ..errors import BackendError
from ..ops.host_copy import PAGEABLE, PINNED
from .checks import check_bool
from .float8_policy import Float8Policy, check_fp8
from .schedule_policy import SchedulePolicy

COMPILERS = ("inductor", "aot_eager")
_CAST_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_ONE_PROCESS = """\
import torch.distributed as dist
dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)"""
_DEFAULTS: Mapping[str, Callable[[], object]] = {
    "schedule": SchedulePolicy,
    "mp_policy": MixedPrecisionPolicy,
    "offload_policy": OffloadPolicy,
    "overrides": dict,
}
_MAY_DIFFER_BETWEEN_RANKS = ("mesh", "ignored_params", "dump")


@dataclass(frozen=True)
class ParamOptions:
    """The validated arguments that apply to one parameter; see ``Options.for_parameter``."""

    reshard_after_forward: bool | int = True
    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    offload_policy: OffloadPolicy = field(default_factory=OffloadPolicy)
    fp8: Float8Policy | None = None
    shard: bool = True
    mesh: DeviceMesh | None = None  # None for the backend's mesh
    dim: int = 0

    def __post_init__(self) -> None:
        _check_reshard_after_forward(self.reshard_after_forward)
        if self.mesh is not None:
            check_mesh(self.mesh)
        if not isinstance(self.dim, int) or isinstance(self.dim, bool):
            raise ValueError(f"dim={self.dim!r}: must be the dimension to split, an integer")
        if not isinstance(self.shard, bool):
            raise ValueError(
                f"shard={self.shard!r}: must be True, or False (DDP: replicate, all-reduce "
                "gradients)"
            )
        _check_mp_policy(self.mp_policy)
        if not isinstance(self.offload_policy, OffloadPolicy):
            raise ValueError(
                f"offload_policy={self.offload_policy!r}: must be a "
                "torch.distributed.fsdp.OffloadPolicy, which keeps shards on the device, or a "
                "CPUOffloadPolicy"
            )
        check_fp8(self.fp8, param_dtype=None)

    def host_memory(self, device_type: str) -> str | None:
        """Return the kind of host memory that holds shards, or None if they stay on the device."""
        if not self.shard or not isinstance(self.offload_policy, CPUOffloadPolicy):
            return None
        pins = self.offload_policy.pin_memory and device_type != "cpu"
        return PINNED if pins else PAGEABLE

    def num_backward_ranks(self, num_shards: int) -> int | None:
        """Return the number of ranks that backward gathers from, or None if it gathers nothing.

        Raises:
            ValueError: the number does not divide ``num_shards``, the number of shards per replica.
        """
        reshard = self.reshard_after_forward
        if isinstance(reshard, bool):
            return num_shards if reshard else None
        if num_shards % reshard:
            raise ValueError(
                f"reshard_after_forward={reshard}: must divide the {num_shards} ranks of the "
                "mesh's shard axis, since backward gathers from groups of that size"
            )
        return reshard if reshard > 1 else None  # one rank keeps the full parameter


@dataclass(frozen=True)
class Options:
    """The arguments of ``graphshard.backend`` and ``graphshard.shard``; see ``backend``."""

    mesh: DeviceMesh | None
    reshard_after_forward: bool | int
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    fp8: Float8Policy | None
    overrides: Mapping[str, Mapping[str, Any]]
    ignored_params: frozenset[nn.Parameter]
    compiler: str
    sync_module_states: bool
    schedule: SchedulePolicy
    dump: Path | None

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> Options:
        """Build options from the arguments of ``backend``; None becomes the default, if any."""
        values = {f.name: arguments[f.name] for f in fields(cls)}
        defaults = {name: make() for name, make in _DEFAULTS.items() if values[name] is None}
        return cls(**{**values, **defaults})

    def __post_init__(self) -> None:
        if self.mesh is not None:
            check_mesh(self.mesh)
        ParamOptions(
            reshard_after_forward=self.reshard_after_forward,
            mp_policy=self.mp_policy,
            offload_policy=self.offload_policy,
            fp8=self.fp8,
        )
        check_fp8(self.fp8, self.mp_policy.param_dtype)
        _check_overrides(self.overrides)
        if self.mesh is not None:
            _check_backward_ranks(self, self.mesh.size(self.mesh.ndim - 1))
        check_bool("sync_module_states", self.sync_module_states)
        if self.compiler not in COMPILERS:
            raise ValueError(f"compiler={self.compiler!r}: must be one of {COMPILERS}")
        if not isinstance(self.schedule, SchedulePolicy):
            raise ValueError(
                f"schedule={self.schedule!r}: must be a graphshard.SchedulePolicy or None"
            )
        object.__setattr__(self, "ignored_params", _parameter_set(self.ignored_params))
        object.__setattr__(self, "dump", _writable_folder(self.dump))

    def strategy(self) -> str:
        """Return the usual name of the strategy, as in "HSDP of ZeRO-3"; ignores ``overrides``."""
        reshard = self.reshard_after_forward
        if isinstance(reshard, bool) or reshard == 1:
            name = "ZeRO-3" if reshard is True else "ZeRO-2"
        else:
            name = f"hpZ of {reshard} ranks"
        is_hybrid = self.mesh is not None and self.mesh.ndim > 1
        return f"HSDP of {name}" if is_hybrid else name

    def fingerprint(self) -> str:
        """Return the options that must be equal on all ranks, as text."""
        names = [f.name for f in fields(self) if f.name not in _MAY_DIFFER_BETWEEN_RANKS]
        values = {name: getattr(self, name) for name in names}
        values["overrides"] = {
            glob: {name: _without_ranks(value) for name, value in arguments.items()}
            for glob, arguments in self.overrides.items()
        }
        return ", ".join(f"{name}={value!r}" for name, value in values.items())

    def num_ranks(self) -> int:
        if self.mesh is not None:
            return self.mesh.size()
        return dist.get_world_size() if dist.is_initialized() else 1

    def for_parameter(self, fqns: Sequence[str]) -> ParamOptions:
        """Return the options of the parameter with these names (several if it is tied)."""
        values = {name: getattr(self, name) for name in _common_names()}
        for glob, arguments in self.overrides.items():
            if any(matches(glob, fqn) for fqn in fqns):
                values.update(arguments)  # later ones win
        return ParamOptions(**values)

    def overrides_reshard(self, fqns: Sequence[str]) -> bool:
        """Return whether ``overrides`` set ``reshard_after_forward`` of the parameter ``fqns``."""
        overrides = self.overrides.items()
        globs = [glob for glob, arguments in overrides if "reshard_after_forward" in arguments]
        return any(matches(glob, fqn) for glob in globs for fqn in fqns)

    def differences_from(self, other: Options) -> list[str]:
        """Return, as text, options that differ from their defaults and from ``other``'s.

        Compares ``overrides``, and the arguments that ``overrides`` can set, except ``mesh``.
        """
        left_out = {name: getattr(ParamOptions(), name) for name in _common_names()}
        left_out["overrides"] = {}
        return [
            f"{name}={getattr(self, name)!r}"
            for name, default in left_out.items()
            if hashable(getattr(self, name))
            not in (hashable(default), hashable(getattr(other, name)))
        ]

    def policy_glob(self, fqn: str) -> str | None:
        """Return the glob whose ``mp_policy`` applies to module ``fqn`` ("" is the model).

        None stands for the policy of the whole model.
        """
        globs = [glob for glob, arguments in self.overrides.items() if "mp_policy" in arguments]
        # The last one wins.
        return next((glob for glob in reversed(globs) if matches(glob, fqn)), None)

    def policy_of(self, glob: str | None) -> MixedPrecisionPolicy:
        if glob is None:
            return self.mp_policy  # the whole model's
        policy: MixedPrecisionPolicy = self.overrides[glob]["mp_policy"]
        return policy


def _common_names() -> list[str]:
    # Without ``mesh``: ``ParamOptions.mesh`` is None unless ``overrides`` sets it.
    names = {f.name for f in fields(Options)} - {"mesh"}
    return [f.name for f in fields(ParamOptions) if f.name in names]


def _without_ranks(value: object) -> object:
    """Return the part of a value in ``overrides`` that must be equal on all ranks."""
    if isinstance(value, DeviceMesh):
        return f"mesh {value.mesh_dim_names} {tuple(value.shape)}"
    return value


def matches(glob: str, fqn: str) -> bool:
    """Return whether ``glob`` matches ``fqn``, or the name of a module that contains it."""
    parts = fqn.split(".")
    parents = (".".join(parts[:depth]) for depth in range(len(parts)))
    return fnmatchcase(fqn, glob) or any(fnmatchcase(parent, glob) for parent in parents)


def _check_overrides(overrides: object) -> None:
    if not isinstance(overrides, Mapping):
        raise ValueError(
            f"overrides={overrides!r}: must be a dict of {{fqn glob: {{argument: value}}}}, or None"
        )
    known = [f.name for f in fields(ParamOptions)]
    for glob, arguments in overrides.items():
        where = f"overrides[{glob!r}]"
        if not isinstance(glob, str) or not isinstance(arguments, Mapping):
            raise ValueError(
                f"{where}={arguments!r}: must map a glob (str) to a dict of {{argument: value}}"
            )
        for name in arguments:
            if name not in known:
                raise ValueError(f"{where} has unknown argument {name!r}: must be one of {known}")
        try:
            options = ParamOptions(**arguments)
            check_fp8(options.fp8, options.mp_policy.param_dtype)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None


def _check_reshard_after_forward(value: object) -> None:
    if not isinstance(value, int) or (value < 1 and value is not False):
        raise ValueError(
            f"reshard_after_forward={value!r}: must be True (ZeRO-3: gather "
            "again in backward), False (ZeRO-2: keep gathered parameters), or the number of ranks "
            "to gather from in backward (hpZ)"
        )


def _check_mp_policy(policy: object) -> None:
    if not isinstance(policy, MixedPrecisionPolicy):
        raise ValueError(
            f"mp_policy={policy!r}: must be a torch.distributed.fsdp.MixedPrecisionPolicy"
        )
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(policy, name)
        if dtype is not None and dtype not in _CAST_DTYPES:
            raise ValueError(f"mp_policy.{name}={dtype!r}: must be None or one of {_CAST_DTYPES}")
    check_bool("mp_policy.cast_forward_inputs", policy.cast_forward_inputs)


def _check_backward_ranks(options: Options, num_shards: int) -> None:
    values = {"": (options.reshard_after_forward, num_shards)}
    for glob, arguments in options.overrides.items():
        mesh = arguments.get("mesh")
        own_shards = num_shards if mesh is None else mesh.size(mesh.ndim - 1)
        value = arguments.get("reshard_after_forward", options.reshard_after_forward)
        values[f"overrides[{glob!r}]: "] = (value, own_shards)
    for prefix, (value, shards) in values.items():
        try:
            ParamOptions(reshard_after_forward=value).num_backward_ranks(shards)
        except ValueError as error:
            raise ValueError(f"{prefix}{error}") from None


def _parameter_set(params: Iterable[nn.Parameter] | None) -> frozenset[nn.Parameter]:
    if params is None:
        return frozenset()
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise ValueError(
            f"ignored_params is a {type(params).__name__}: pass an iterable of nn.Parameter "
            "objects, or None"
        )
    unique = frozenset(params)
    for param in unique:
        if not isinstance(param, nn.Parameter):
            raise ValueError(
                f"ignored_params contains a {type(param).__name__}: pass nn.Parameter objects"
            )
    return unique


def _writable_folder(dump: object) -> Path | None:
    if dump is None:
        return None
    if not isinstance(dump, (str, os.PathLike)) or not os.fspath(dump):
        raise ValueError(f"dump={dump!r}: must be the path of a folder, or None")
    path = Path(os.fsdecode(dump)).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):  # shows that files can be written
            return path
    except OSError as error:
        raise ValueError(
            f"dump={str(dump)!r}: {error.strerror}: choose a writable folder"
        ) from error


def check_mesh(mesh: object) -> None:
    """Raise ValueError unless ``mesh`` is a 1D or 2D data mesh with ascending ranks."""
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"mesh={mesh!r}: must be a torch.distributed.device_mesh.DeviceMesh or None"
        )
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"mesh has {mesh.ndim} axes {mesh.mesh_dim_names or tuple(mesh.shape)}: use one axis, "
            "for shards, or two, for replicas and shards (HSDP), as in "
            "mesh['replicate', 'shard']"
        )
    with unset_fake_temporarily():  # forecasts make backends in fake mode
        ranks = [] if isinstance(mesh.mesh, FakeTensor) else mesh.mesh.tolist()
    lines = [ranks] if mesh.ndim == 1 else [*ranks, *zip(*ranks)]
    if any(list(line) != sorted(line) for line in lines):
        raise ValueError(
            f"mesh has ranks {ranks}: pass a mesh whose ranks ascend along each axis, "
            "as in a mesh from init_device_mesh"
        )
    names = mesh.mesh_dim_names or ()
    if split := [name for name in names if mesh.ndim == 2 and name in ("tp", "ep", "pp")]:
        raise ValueError(
            f"mesh has axes {names}: two axes are for replicas and shards (HSDP), so {split[0]!r} "
            "would be an axis of data parallelism. Pass only the data axes, as in mesh['dp']"
        )


def mesh_for(options: Options, params: Iterable[nn.Parameter]) -> DeviceMesh:
    """Return the mesh of ``options``; by default, a 1D mesh of all ranks on the training device.

    Raises:
        BackendError: there is neither a mesh nor a process group.
    """
    if options.mesh is not None:
        return options.mesh
    if not dist.is_available() or not dist.is_initialized():
        raise BackendError(
            "there is no process group to shard over: launch with torchrun, and call "
            "torch.distributed.init_process_group() first; to train in a single process, as in a "
            f"notebook, add\n{_ONE_PROCESS}"
        )
    return init_device_mesh(_device_type(params, options), (dist.get_world_size(),))


def _device_type(params: Iterable[nn.Parameter], options: Options) -> str:
    kinds = [param.device.type for param in params]
    if on_device := [kind for kind in kinds if kind not in ("cpu", "meta")]:
        return on_device[0]
    kind = next(iter(kinds), "meta")
    # Parameters need not be on the accelerator yet if they are on meta or offloaded.
    if kind == "meta" or (kind == "cpu" and isinstance(options.offload_policy, CPUOffloadPolicy)):
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return accelerator.type if accelerator is not None else "cpu"
    return kind


def hashable(value: object) -> Hashable:
    """Return a hashable value that is equal for equal options; mappings need the same order."""
    if isinstance(value, Mapping):
        # Order matters: if several overrides match, the last one wins.
        return tuple((key, hashable(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(hashable, value))
    if isinstance(value, (set, frozenset)):
        return frozenset(map(hashable, value))
    if is_dataclass(value) and not isinstance(value, type):
        # Not the value itself: torch's policies are not all hashable.
        return type(value), *(hashable(getattr(value, part.name)) for part in fields(value))
    # With the type: 1 equals True, but reshard_after_forward=1 is not True.
    return type(value), value if isinstance(value, Hashable) else id(value)
