"""Muon with orthogonalization distributed over the ranks that hold the matrices.

``torch.optim.Muon`` on DTensors gathers and orthogonalizes every matrix on every rank. Here each
rank orthogonalizes only its share:

    rows of each rank   momentum ─► all-to-all ─► whole matrices ─► results ─► all-to-all ─► step
    bucket i + 1                    launched ····│ bucket i is computed │···· waited for
    bucket i                                       launched ····│ i + 1 is computed │···· applied

Both directions send bfloat16, in which Muon orthogonalizes anyway. All ranks must step the same
matrices: ranks log the matrices of a step and, if these have changed since the last step, agree
before anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._torch.dtensor import values_on_rank
from .._torch.nn import adjusted_lr, orthogonalized
from ..params.full_tensor import spec_of
from ..params.mesh import MeshGroups, agreed_exchange
from ..params.sharded_param import sharded_param_of
from ..ranks.calls import OPTIMIZER_STEP
from .row_exchange import WIRE_DTYPE, InFlight, MatrixBatch, RowExchange, assign_matrices

Group = dict[str, Any]
# ``max_bytes_per_rank`` of ``assign_matrices``. Up to three buckets are in memory at a time.
BUCKET_BYTES = 8 * 2**20


class _Stepped(NamedTuple):
    """A matrix that has a gradient, and its parameter group."""

    param: Tensor
    group: Group


class _MeshPlan(NamedTuple):
    """Matrices sharded over one mesh, and their assignment to its ranks."""

    groups: MeshGroups
    matrices: list[_Stepped]
    buckets: list[MatrixBatch]
    exchange: RowExchange
    text: str  # description that must be equal on all ranks


class _Plan(NamedTuple):
    matrices: list[_Stepped]
    alone: list[_Stepped]  # matrices stepped without communication
    by_mesh: list[_MeshPlan]  # one for each mesh


class Muon(torch.optim.Muon):
    """``torch.optim.Muon`` for sharded matrices, with the same arguments, state and numerics.

    Parameters are matrices: plain, replicated, or split by rows over a 1D mesh (``Shard(0)``) or
    over the second axis of a 2D mesh (``Replicate(), Shard(0)``), as graphshard and FSDP2 split
    them. All ranks of the mesh have to step together. A step sends each split matrix twice, in
    bfloat16.

    Raises:
        ValueError: a parameter is not a matrix; or, in a step, is complex, or has other placements,
            a gradient that is sparse or has other placements, or plain state for a DTensor (or vice
            versa).
        BackendError: in a step, on all ranks, if they do not step the same matrices.
    """

    _plan: _Plan | None = None  # plan of the last step; a copied optimizer makes a new one

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        number = len(self.param_groups) - 1
        for i, param in enumerate(self.param_groups[number]["params"]):
            if param.ndim != 2:
                name, shape = _name(self.param_groups, number, i), tuple(param.shape)
                self.param_groups.pop()
                raise ValueError(
                    f"Muon only updates 2D parameters, but {name} has shape {shape}: give it to "
                    "another optimizer, such as torch.optim.AdamW. Give Muon only parameters with "
                    "p.ndim == 2, except embeddings and the output layer"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_all()
        return loss

    @torch.compiler.disable  # exchanges are launched ahead, which a compiled optimizer cannot do
    def _step_all(self) -> None:
        plan, is_new = self._planned()
        for param, group in plan.alone:
            _apply(param, group, _orthogonalized(self._direction(param, group), group))
        for part in plan.by_mesh:
            with agreed_exchange(part.groups, part.text, is_new=is_new):
                self._step_mesh(part)

    def _planned(self) -> tuple[_Plan, bool]:
        """Return the plan of this step, and whether it differs from the last step's."""
        matrices = [
            _Stepped(param, group)
            for group in self.param_groups
            for param in group["params"]
            if param.grad is not None and param.numel()
        ]
        for param, _ in matrices:
            momentum = self.state.get(param, {}).get("momentum_buffer")
            if momentum is not None and isinstance(momentum, DTensor) != isinstance(param, DTensor):
                raise ValueError(_foreign_state(param, momentum))
        if self._plan is not None and _are_same(self._plan.matrices, matrices):
            return self._plan, False
        self._plan = _make_plan(matrices, self.param_groups)
        return self._plan, True

    def _step_mesh(self, mesh_plan: _MeshPlan) -> None:
        exchange, buckets = mesh_plan.exchange, mesh_plan.buckets

        def launch(number: int) -> InFlight | None:
            if number == len(buckets):
                return None
            return exchange.to_owners(
                buckets[number], lambda i: self._direction(*mesh_plan.matrices[i])
            )

        def apply(number: int, results: InFlight) -> None:
            for owned, rows in zip(buckets[number], results.wait()):
                _apply(*mesh_plan.matrices[owned.matrix], rows)

        coming, leaving = launch(0), None
        for number, bucket in enumerate(buckets):
            assert coming is not None
            current, coming = coming, launch(number + 1)  # in flight while this one is computed
            groups = [mesh_plan.matrices[owned.matrix].group for owned in exchange.owned(bucket)]
            whole = exchange.whole(bucket, current.wait())
            results = [_orthogonalized(full, group) for full, group in zip(whole, groups)]
            before, leaving = leaving, exchange.to_all(bucket, results)
            if before is not None:
                apply(number - 1, before)
        if leaving is not None:
            apply(len(buckets) - 1, leaving)

    def _direction(self, param: Tensor, group: Group) -> Tensor:
        assert param.grad is not None
        state, momentum = self.state[param], group["momentum"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(
                param.grad, memory_format=torch.preserve_format
            )
        grad, buffer = values_on_rank(param.grad), values_on_rank(state["momentum_buffer"])
        buffer.lerp_(grad, 1 - momentum)
        direction = grad.lerp(buffer, momentum) if group["nesterov"] else buffer
        return direction.to(WIRE_DTYPE)  # this rank's rows, to be orthogonalized


# --- plans ---------------------------------------------------------------------------------------


def _are_same(ours: Sequence[_Stepped], theirs: Sequence[_Stepped]) -> bool:
    return len(ours) == len(theirs) and all(
        a.param is b.param and a.group is b.group and _has_fitting_gradient(b.param)
        for a, b in zip(ours, theirs)
    )


def _has_fitting_gradient(param: Tensor) -> bool:
    """Return whether the gradient has ``param``'s placements or, for a plain tensor, is dense."""
    grad = param.grad
    assert grad is not None
    if isinstance(param, DTensor):
        return isinstance(grad, DTensor) and grad.placements == param.placements
    return not grad.is_sparse


def _foreign_state(param: Tensor, momentum: Tensor) -> str:
    sharded = sharded_param_of(param)
    return (
        f"momentum_buffer of {'a matrix' if sharded is None else repr(sharded.fqn)} is a "
        f"{type(momentum).__name__}, but the parameter is a {type(param).__name__}: load the state "
        "with torch.distributed.checkpoint, or by set_optimizer_state_dict with "
        "StateDictOptions(full_state_dict=True)"
    )


def _make_plan(matrices: list[_Stepped], param_groups: Sequence[Group]) -> _Plan:
    names = {
        param: _name(param_groups, number, i)
        for number, group in enumerate(param_groups)
        for i, param in enumerate(group["params"])
    }
    alone: list[_Stepped] = []
    by_mesh: dict[DeviceMesh, list[_Stepped]] = {}
    for stepped in matrices:
        mesh = _mesh_of(stepped.param, names[stepped.param])
        (alone if mesh is None else by_mesh.setdefault(mesh, [])).append(stepped)
    numbers = {id(group): number for number, group in enumerate(param_groups)}
    mesh_plans = [_plan_mesh(mesh, shared, names, numbers) for mesh, shared in by_mesh.items()]
    return _Plan(matrices, alone, mesh_plans)


def _plan_mesh(
    mesh: DeviceMesh,
    matrices: list[_Stepped],
    names: dict[Tensor, str],
    numbers: dict[int, int],
) -> _MeshPlan:
    groups = MeshGroups(mesh)
    exchange = RowExchange(groups)
    shapes = [(param.shape[0], param.shape[1]) for param, _ in matrices]
    buckets = assign_matrices(shapes, exchange.num_ranks, BUCKET_BYTES)
    lines = [
        f"{names[param]} {tuple(param.shape)} in group {numbers[id(group)]}"
        for param, group in matrices
    ]
    text = "\n".join([f"{OPTIMIZER_STEP} of Muon", *lines])
    return _MeshPlan(groups, matrices, buckets, exchange, text)


def _mesh_of(param: Tensor, name: str) -> DeviceMesh | None:
    """Return the mesh that splits the rows of a matrix, or None if this rank has all rows.

    Raises:
        ValueError: Muon cannot step the matrix.
    """
    assert param.grad is not None
    if param.is_complex() or param.grad.is_sparse:
        what = "is complex" if param.is_complex() else "has a sparse gradient"
        raise ValueError(f"Muon cannot step {name}, which {what}: give it to another optimizer")
    if not isinstance(param, DTensor):
        return None
    mesh, spec = param.device_mesh, spec_of(param)
    if spec is None or spec.dim or not _has_fitting_gradient(param):
        of_grad = param.grad.placements if isinstance(param.grad, DTensor) else "not a DTensor"
        raise ValueError(
            f"Muon cannot step {name}, placed as {param.placements} (its gradient: {of_grad}) over "
            f"{mesh}: replicate it, or use Shard(0) on a 1D mesh or (Replicate(), Shard(0)) on a "
            "2D mesh; its gradient must have the same placements"
        )
    return None if spec.rows is None or mesh.size() == 1 else mesh


def _name(param_groups: Sequence[Group], number: int, index: int) -> str:
    group = param_groups[number]
    sharded_param = sharded_param_of(group["params"][index])
    if sharded_param is not None:
        return f"parameter {sharded_param.fqn!r}"
    if "param_names" in group:
        return f"parameter {group['param_names'][index]!r}"
    return f"parameter {index} of group {number}"


# --- arithmetic ----------------------------------------------------------------------------------


def _orthogonalized(matrix: Tensor, group: Group) -> Tensor:
    return orthogonalized(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])


def _apply(param: Tensor, group: Group, rows: Tensor) -> None:
    """Decay this rank's rows of ``param`` and subtract ``rows`` times an adjusted learning rate."""
    lr: Any = group["lr"].squeeze() if isinstance(group["lr"], Tensor) else group["lr"]
    own = values_on_rank(param)
    own.mul_(1 - lr * group["weight_decay"])
    own.add_(rows.to(own.device), alpha=-adjusted_lr(lr, group["adjust_lr_fn"], param.shape))
