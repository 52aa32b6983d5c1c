"""Memory that a sharded model needs on a rank, compared with the unsharded model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from tabulate import tabulate
from torch import nn

from .._torch.dtensor import values_on_rank
from .._torch.tensors import tree_leaves
from .plain_params import live_optimizers
from .sharded_param import ShardedModel, ShardedParam, is_offloaded, sharded_param_of
from .trained_module import uncompiled_module

_R = TypeVar("_R")


class MemoryBytes(NamedTuple):
    """Bytes on this rank, and bytes without sharding."""

    rank: int
    unsharded: int


@dataclass(frozen=True)
class MemoryReport:
    """Memory of a model by purpose; ``print`` shows a table in MB (1e6 bytes).

    Attributes:
        parameters: shards, including padding, and parameters that are not sharded.
        gradients: gradients of all parameters that require one, whether or not they exist now.
        sums: unreduced microbatch gradients currently held, such as those of ``no_sync``.
        optimizer: current optimizer state of the model's parameters, 0 without an optimizer.
        gathered: planned peak of unsharded parameters, over all graphs run so far.
        on_host: part of parameters, gradients and optimizer state in host memory
            (``offload_policy``).
    """

    parameters: MemoryBytes
    buffers: MemoryBytes
    gradients: MemoryBytes
    sums: MemoryBytes
    optimizer: MemoryBytes
    gathered: MemoryBytes
    on_host: MemoryBytes

    @property
    def total(self) -> MemoryBytes:
        """Sum of all parts, in device or host memory, including the planned peak ``gathered``."""
        parts = [part for name, part in vars(self).items() if name != "on_host"]
        return MemoryBytes(*map(sum, zip(*parts)))

    def __str__(self) -> str:
        lines = {**vars(self), "total": self.total, "total, on the host": self.on_host}
        del lines["on_host"]
        rows = [[name, part.rank / 1e6, part.unsharded / 1e6] for name, part in lines.items()]
        return tabulate(rows, ["MB", "per rank", "unsharded"], floatfmt=".3f")


def memory_report(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> MemoryReport:
    """Return the memory of ``model`` and its optimizer on this rank, without communication.

    ``model`` may be compiled, and need not be sharded.

    Raises:
        ValueError: ``model`` is not a module, or ``optimizer`` is not an optimizer.
    """
    root = uncompiled_module(model)
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer is a {type(optimizer).__name__}: pass a torch.optim.Optimizer")
    state = {} if optimizer is None else optimizer.state
    params = list(root.parameters())
    sharded_params = [p for p in map(sharded_param_of, params) if p is not None]
    totals = [total for param in sharded_params for total in param.unreduced_totals()]

    def trained(params: Sequence[nn.Parameter]) -> list[MemoryBytes]:
        values = [value for param in params for value in tree_leaves(state.get(param, {}))]
        return [_memory(params), _memory(p for p in params if p.requires_grad), _memory(values)]

    parameters, gradients, optimizer_state = trained(params)
    on_host = trained(list(filter(is_offloaded, params)))
    return MemoryReport(
        parameters=parameters,
        buffers=_memory(root.buffers()),
        gradients=gradients,
        sums=MemoryBytes(sum(total.nbytes for total in totals), 0),
        optimizer=optimizer_state,
        gathered=MemoryBytes(max((p.model.gathered_bytes for p in sharded_params), default=0), 0),
        on_host=MemoryBytes(sum(part.rank for part in on_host), 0),
    )


def with_gathered_bytes(
    compiled: Callable[..., _R], params: Sequence[ShardedParam | None], gathered_bytes: int
) -> Callable[..., _R]:
    """Wrap a compiled graph so that the models it runs for record its ``gathered_bytes``.

    Args:
        params: sharded parameters of the graph's inputs, None for other inputs.
    """
    # Other models with the same code reuse the graph. Every run looks at one shard of each model.
    of_models = {param.model: i for i, param in enumerate(params) if param is not None}
    positions = list(of_models.values())

    def run(*args: object) -> _R:
        for i in positions:
            param = sharded_param_of(args[i])
            if param is not None and param.model.gathered_bytes < gathered_bytes:
                param.model.gathered_bytes = gathered_bytes
        return compiled(*args)

    return run


def future_state_bytes(models: Iterable[ShardedModel], device: torch.device) -> int:
    """Return the bytes that optimizer states of ``models`` will add on ``device``.

    Assumes two values per trained parameter that has no state yet, as in Adam.
    """
    trained = {
        param.dtensor: param.shard.nbytes
        for model in models
        for param in model.sharded_params
        if param.is_owned() and param.dtensor.requires_grad
        if param.shard.device.type == device.type
    }
    stepped = {param for one in live_optimizers() for param in trained if one.state.get(param)}
    return 2 * sum(num_bytes for param, num_bytes in trained.items() if param not in stepped)


def _memory(values: Iterable[object]) -> MemoryBytes:
    # Keyed by id: tied parameters are one tensor.
    tensors = {id(value): value for value in values if isinstance(value, torch.Tensor)}.values()
    return MemoryBytes(
        rank=sum(_rank_bytes(tensor) for tensor in tensors),
        unsharded=sum(tensor.nbytes for tensor in tensors),
    )


def _rank_bytes(tensor: torch.Tensor) -> int:
    sharded_param = sharded_param_of(tensor)
    held = values_on_rank(tensor) if sharded_param is None else sharded_param.shard
    return held.nbytes
