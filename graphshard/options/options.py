"""What a user may ask for, frozen, and checked here once, before anything is changed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from ..ops.host_copy import PAGEABLE, PINNED
from .float8_policy import Float8Policy, check_fp8
from .schedule_policy import SchedulePolicy

COMPILERS = ("inductor", "aot_eager")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_MP_FIELDS = ("param_dtype", "reduce_dtype", "output_dtype")


@dataclass(frozen=True)
class ParamOptions:
    """What may differ between the parameters of a model; see ``Options.of_param``."""

    reshard_after_forward: bool | int = True
    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    offload_policy: OffloadPolicy = field(default_factory=OffloadPolicy)
    fp8: Float8Policy | None = None
    shard: bool = True

    def __post_init__(self) -> None:
        asked = self.reshard_after_forward
        if not isinstance(asked, int) or (asked < 1 and asked is not False):
            raise ValueError(
                f"reshard_after_forward={asked!r}: must be True (ZeRO-3: gather "
                "again in backward), False (ZeRO-2: keep gathered parameters), or how many ranks to "
                "gather from in backward (hpZ)"
            )
        if not isinstance(self.shard, bool):
            raise ValueError(
                f"shard={self.shard!r}: must be True, or False (DDP: replicate, all-reduce gradients)"
            )
        check_policy("mp_policy", self.mp_policy)
        if not isinstance(self.offload_policy, OffloadPolicy):
            raise ValueError(
                f"offload_policy={self.offload_policy!r}: must be a torch.distributed.fsdp.OffloadPolicy, "
                "which keeps shards on the device, or a CPUOffloadPolicy"
            )
        check_fp8("fp8", self.fp8, None)

    def host(self, device_type: str) -> str:
        """The memory of the host that keeps the shards, of ``graphshard.ops.host_copy``; "": the device does."""
        policy = self.offload_policy
        if not isinstance(policy, CPUOffloadPolicy):
            return ""
        return PINNED if policy.pin_memory and device_type != "cpu" else PAGEABLE


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
    def of(cls, arguments: dict[str, Any]) -> Options:
        """Of all arguments of ``backend``, by name."""
        given = {f.name: arguments[f.name] for f in fields(cls)}
        defaults = {
            "schedule": SchedulePolicy,
            "mp_policy": MixedPrecisionPolicy,
            "offload_policy": OffloadPolicy,
            "overrides": dict,
        }
        missing = {name: make() for name, make in defaults.items() if given[name] is None}
        return cls(**{**given, **missing})

    def __post_init__(self) -> None:
        if self.mesh is not None:
            check_mesh(self.mesh)
        ParamOptions(self.reshard_after_forward, self.mp_policy, self.offload_policy, self.fp8)
        check_fp8("fp8", self.fp8, self.mp_policy.param_dtype)
        _check_overrides(self.overrides)
        if self.mesh is not None:
            _check_resharding(self, self.mesh.size(self.mesh.ndim - 1))
        if not isinstance(self.sync_module_states, bool):
            raise ValueError(
                f"sync_module_states={self.sync_module_states!r}: must be True or False"
            )
        if self.compiler not in COMPILERS:
            raise ValueError(f"compiler={self.compiler!r}: must be one of {COMPILERS}")
        if not isinstance(self.schedule, SchedulePolicy):
            raise ValueError(f"schedule={self.schedule!r}: must be a graphshard.SchedulePolicy")
        object.__setattr__(self, "ignored_params", _parameters(self.ignored_params))
        object.__setattr__(self, "dump", _folder(self.dump))

    def fingerprint(self) -> str:
        """What has to be equal on all ranks, as text."""
        own = ("mesh", "ignored_params", "dump")
        agreed = [f.name for f in fields(self) if f.name not in own]
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in agreed)

    def of_param(self, fqns: Iterable[str]) -> ParamOptions:
        """For a parameter of these names; of several overrides that match, the later ones win."""
        found = {
            f.name: getattr(self, f.name) for f in fields(ParamOptions) if hasattr(self, f.name)
        }
        for glob, arguments in self.overrides.items():
            if any(fnmatchcase(fqn, glob) for fqn in fqns):
                found.update(arguments)
        return ParamOptions(**found)

    def unmatched(self, fqns: Iterable[str]) -> list[str]:
        """The globs of ``overrides`` that no name matches."""
        fqns = list(fqns)
        return [glob for glob in self.overrides if not any(fnmatchcase(f, glob) for f in fqns)]


def check_policy(name: str, policy: object) -> None:
    """
    Raises:
        ValueError: ``policy`` is none, or asks for what cannot be.
    """
    if not isinstance(policy, MixedPrecisionPolicy):
        raise ValueError(
            f"{name}={policy!r}: must be a torch.distributed.fsdp.MixedPrecisionPolicy"
        )
    for name_of_field in _MP_FIELDS:
        dtype = getattr(policy, name_of_field)
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"{name}.{name_of_field}={dtype!r}: must be None or one of {DTYPES}")
    if not isinstance(policy.cast_forward_inputs, bool):
        raise ValueError(
            f"{name}.cast_forward_inputs={policy.cast_forward_inputs!r}: must be True or False"
        )


def _check_overrides(overrides: object) -> None:
    if not isinstance(overrides, Mapping):
        raise ValueError(
            f"overrides={overrides!r}: must be a dict of {{fqn glob: {{argument: value}}}}"
        )
    known = [f.name for f in fields(ParamOptions)]
    for glob, arguments in overrides.items():
        where = f"overrides[{glob!r}]"
        if not isinstance(glob, str) or not isinstance(arguments, Mapping):
            raise ValueError(f"{where}={arguments!r}: must be a dict of {{argument: value}}")
        for name in arguments:
            if name not in known:
                raise ValueError(f"{where} has {name!r}: must be one of {known}")
        try:
            mine = ParamOptions(**arguments)
            check_fp8("fp8", mine.fp8, mine.mp_policy.param_dtype)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None


def _check_resharding(options: Options, num_shards: int) -> None:
    where = {"": options.reshard_after_forward}
    for glob, arguments in options.overrides.items():
        where[f"overrides[{glob!r}]: "] = arguments.get("reshard_after_forward", True)
    for text, asked in where.items():
        try:
            few_ranks(asked, num_shards)
        except ValueError as error:
            raise ValueError(f"{text}{error}") from None


def few_ranks(reshard_after_forward: bool | int, num_shards: int) -> int | None:
    """From how many ranks backward gathers; None: it does not.

    Raises:
        ValueError: that many do not divide the shards.
    """
    if isinstance(reshard_after_forward, bool):
        return num_shards if reshard_after_forward else None
    if reshard_after_forward < 1 or num_shards % reshard_after_forward:
        raise ValueError(
            f"reshard_after_forward={reshard_after_forward}: backward can gather from a number of ranks "
            f"that divides the {num_shards} of the mesh's shard axis"
        )
    return reshard_after_forward if reshard_after_forward > 1 else None


def _parameters(params: Iterable[nn.Parameter] | None) -> frozenset[nn.Parameter]:
    if params is None:
        return frozenset()
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise ValueError(
            f"ignored_params is a {type(params).__name__}: give a set of nn.Parameter objects"
        )
    found = frozenset(params)
    for param in found:
        if not isinstance(param, nn.Parameter):
            raise ValueError(
                f"ignored_params holds a {type(param).__name__}: give the nn.Parameter objects"
            )
    return found


def _folder(dump: object) -> Path | None:
    """Made, if it is missing, and known to be writable."""
    if dump is None:
        return None
    if not isinstance(dump, (str, os.PathLike)) or not os.fspath(dump):
        raise ValueError(f"dump={dump!r}: must be the path of a folder")
    path = Path(os.fsdecode(dump)).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise ValueError(
            f"dump={str(dump)!r}: {error.strerror}; give a folder that can be written"
        ) from error


def check_mesh(mesh: DeviceMesh) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"mesh={mesh!r}: must be a torch.distributed.device_mesh.DeviceMesh or None"
        )
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"mesh has {mesh.ndim} axes {mesh.mesh_dim_names or tuple(mesh.shape)}: give one over which "
            "to shard, or two, of replicas and shards (HSDP); slice it, as in mesh['replicate', 'shard']"
        )


def default_mesh(device_type: str) -> DeviceMesh:
    """A 1D mesh over the default process group."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "mesh=None: there is no process group; call torch.distributed.init_process_group "
            "(and launch with torchrun) before the first step"
        )
    return init_device_mesh(device_type, (dist.get_world_size(),))
