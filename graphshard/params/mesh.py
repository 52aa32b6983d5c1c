"""Process groups of a mesh, and the log of collectives that run on them outside of graphs.

[Note: logged collectives] A rank may run code eagerly that its peers still run as a graph, because
Dynamo falls back to Python at the recompile limit. Collectives outside of graphs are therefore
logged in the mesh's call log, which makes diverging ranks raise a ``BackendError`` instead of
hanging. In compiled code, a rank's first run of a gather waits until all ranks have reached it.
Gathers in plain calls of a model and reductions (their order follows from gathers) are only logged.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._torch.distributed import (
    group_timeout_s,
    is_registered,
    name_for_graphs,
    new_local_group,
    process_group,
)
from .._torch.dtensor import concatenated
from .._torch.dynamo import at_recompile_limit
from .._torch.frames import compiled_call, describe_code
from ..ranks.agree import digest
from ..ranks.call_log import CallLog, call_log_of
from ..ranks.calls import BY_ALL_RANKS, LIMIT

# Process groups are global and creating one is a collective: all mesh objects over the same ranks
# share one.
_created: dict[tuple[int, ...], dist.ProcessGroup] = {}


@dataclass(frozen=True)
class MeshGroups:
    """Names of the process groups of a mesh.

    Attributes:
        mesh: 1D mesh to shard over, or 2D mesh (replicas, shards).
        tp_mesh: 1D mesh over which tensor or expert parallelism has split parameters before they
            are sharded over ``mesh``, or None. The ranks of both meshes train one model.
        default: groups of the backend's mesh if ``mesh`` is from ``overrides``, else None. Ranks
            outside of ``mesh`` may then hold other values under the same name, such as other
            experts.
    """

    mesh: DeviceMesh
    tp_mesh: DeviceMesh | None = None
    default: MeshGroups | None = None

    @property
    def of_model(self) -> MeshGroups:
        """Groups of the backend's mesh, which most parameters use."""
        return self.default or self

    @cached_property
    def whole_mesh(self) -> DeviceMesh:
        return self.mesh if self.tp_mesh is None else concatenated(self.mesh, self.tp_mesh)

    @cached_property
    def ranks_of_model(self) -> frozenset[int]:
        """Global ranks that train the model: those of ``all_ranks``."""
        return frozenset(self.of_model.whole_mesh.mesh.flatten().tolist())

    @property
    def device(self) -> torch.device:
        # Where this rank computes: with offload, parameters are on the CPU.
        kind = self.mesh.device_type
        if kind == "cpu":
            return torch.device(kind)
        return torch.device(kind, torch.get_device_module(kind).current_device())

    @property
    def num_shards(self) -> int:
        """Number of shards per replica."""
        return self.mesh.size(self.mesh.ndim - 1)

    @cached_property
    def shards(self) -> str:
        """Shard group: the ranks that hold the shards of one replica."""
        return name_for_graphs(self.mesh.get_group(self.mesh.ndim - 1))

    @cached_property
    def replicas(self) -> str | None:
        """Replica group: the ranks that hold the same shards, or None with one replica."""
        several = self.mesh.ndim == 2 and self.mesh.size(0) > 1
        return name_for_graphs(self.mesh.get_group(0)) if several else None

    @cached_property
    def data_ranks(self) -> str:
        """Group of all ranks of ``mesh``, over which gradients are reduced."""
        return self.shards if self.mesh.ndim == 1 else self._group_of_mesh(self.mesh)

    @cached_property
    def all_ranks(self) -> str:
        """Group of all ranks that train the model.

        Consistency checks compare all of these ranks, and fail on all of them.
        """
        if self.default is not None:
            return self.default.all_ranks
        return self.data_ranks if self.tp_mesh is None else self._group_of_mesh(self.whole_mesh)

    @cached_property
    def tp_ranks(self) -> str | None:
        return None if self.tp_mesh is None else self.tp_mesh.get_group().group_name

    def regather_group(self, num_ranks: int) -> str:
        """Return the group of ``num_ranks`` consecutive ranks of the mesh, including this rank.

        The first call may be a collective, because it may create the group.
        """
        if num_ranks == self.num_shards:
            return self.shards
        rows = self.mesh.mesh.reshape(-1, num_ranks).tolist()  # num_ranks divides num_shards
        return self._group_of(next(ranks for ranks in rows if dist.get_rank() in ranks))

    def _group_of_mesh(self, mesh: DeviceMesh) -> str:
        return self._group_of(mesh.mesh.flatten().tolist())

    def _group_of(self, ranks: Sequence[int]) -> str:
        """Return the group of ``ranks``; the call that creates it is a collective over them."""
        if len(ranks) == dist.get_world_size():
            return dist.group.WORLD.group_name  # type: ignore[union-attr]  # it is initialized
        key = tuple(sorted(ranks))
        group = _created.get(key)
        if group is None or not is_registered(group):
            timeout = timedelta(seconds=group_timeout_s(process_group(self.shards)))
            # Synchronize only ``ranks``: the mesh may be a slice of a larger one, whose other ranks
            # may shard something else, or nothing.
            _created[key] = group = new_local_group(key, timeout)
        return name_for_graphs(group)


def eager_gather(groups: MeshGroups, fqns: Sequence[str]) -> AbstractContextManager[None]:
    """Log a gather of one module's parameters; return the context to run it in.

    In compiled code, the first such gather waits for all ranks: see [Note: logged collectives].
    """
    call_log, call = call_log_of_mesh(groups), compiled_call()
    what = f"a gather of {fqns[0]!r} outside of a graph"
    if call.backend is None:  # a plain call: see [Note: logged collectives]
        call_log.run(what)
    else:
        plan_id = f"{what}, in compiled code"
        limited = [describe_code(code) for code in call.codes if at_recompile_limit(code)]
        reason = f": {LIMIT} for {limited[0]}" if limited else ""
        call_log.announce(plan_id, "\n".join([plan_id + reason, *fqns]))
    return call_log.raising_posted_error()


def eager_reduction(groups: MeshGroups, fqn: str) -> AbstractContextManager[None]:
    """Log a reduction of gradients; return the context to run it in.

    Args:
        fqn: name of the first parameter whose gradient is reduced.
    """
    call_log = call_log_of_mesh(groups)
    call_log.run(f"a reduction of gradients of {fqn!r} outside of a graph")
    return call_log.raising_posted_error()


def agreed_exchange(
    groups: MeshGroups, text: str, *, is_new: bool = False
) -> AbstractContextManager[None]:
    """Log communication that ``text`` describes; return the context to run it in.

    If this rank has not logged ``text`` before, waits until all ranks have logged it.

    Args:
        text: description that is equal on all ranks; its first line names the purpose.
        is_new: whether to wait even if this rank has logged ``text`` before. If every rank passes
            True whenever ``text`` changes, ranks that differ raise instead of mixing their data.
    """
    call_log, plan_id = call_log_of_mesh(groups), digest(text)
    if is_new:
        call_log.first_run(plan_id, text)
    else:
        call_log.announce(plan_id, text)
    return call_log.raising_posted_error()


def agree_on_gathering(groups: MeshGroups, what: str, name: str, remedy: str) -> None:
    """Wait until all ranks have called ``what``, a function that gathers or saves ``name``.

    If only some ranks call ``what``, the error quotes ``remedy``, which says what to call instead.
    """
    text = f"{what} of {name}, {BY_ALL_RANKS}: {remedy}"
    agreed_exchange(groups, text, is_new=True)


def call_log_of_mesh(groups: MeshGroups) -> CallLog:
    """Return the call log of all ranks that train a model; every one of them must call this."""
    call_log = call_log_of(process_group(groups.all_ranks))
    # On an error, release ranks that are blocked in any group of the mesh.
    names = (groups.shards, groups.replicas, groups.data_ranks, groups.tp_ranks)
    for name in filter(None, names):
        call_log.release_also(process_group(name))
    return call_log
