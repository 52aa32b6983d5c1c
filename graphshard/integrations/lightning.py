"""Lightning: strategies for its Trainer and for Fabric, and ``configure`` for a LightningModule.

    class Model(LightningModule):
        def configure_model(self):                        # Lightning calls it before training
            configure(self, self.net, mp_policy=policy)   # shards self.net over all ranks

    Trainer(strategy=ShardedStrategy(), accelerator="auto", devices=8)
    Fabric(strategy=ShardedFabricStrategy(mp_policy=policy), devices=8)

Both strategies are Lightning's ``ModelParallelStrategy``, which saves DTensors (one folder written
by all ranks, or one file) and leaves sharding to the user. They change two things: all ranks are
data parallel, whereas Lightning's "auto" sizes shard nothing on one node; and accumulated
microbatches communicate nothing, which Lightning supports only for DDP and FSDP2. Based on
Lightning 2.6: ``pytorch/strategies/parallel.py``, ``pytorch/strategies/model_parallel.py`` and
``fabric/strategies/model_parallel.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning import LightningModule
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy as FabricStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl as BackwardSyncControl
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..dynamo_backend import backend
from ..params.grad_sync import no_sync
from .common import is_sharded, may_be_moved, shard_and_compile


def configure(owner: LightningModule, model: nn.Module, **options: Any) -> None:
    """Shard and compile a module of ``owner``; call it in ``configure_model``.

    Lightning calls ``configure_model`` again for validation and for every further ``fit``; a module
    that is already sharded is not changed.

    Args:
        owner: LightningModule attached to a Trainer.
        model: module that ``training_step`` calls; not ``owner``, whose forward Lightning does not
            call.
        options: arguments of :func:`graphshard.backend`; the mesh defaults to the strategy's.

    Raises:
        ValueError: ``model`` is ``owner``, the Trainer's strategy has no mesh (DDP, FSDP), or
            :func:`graphshard.backend` rejects an option.
    """
    if model is owner:
        raise ValueError(
            "Lightning calls training_step instead of the LightningModule's forward: pass "
            "configure() the module that training_step calls, such as self.net"
        )
    if not is_sharded(model):
        strategy = owner.trainer.strategy
        if owner.device_mesh is None:
            raise ValueError(
                f"the Trainer has {type(strategy).__name__}: pass the Trainer "
                "strategy=ShardedStrategy() from graphshard.integrations.lightning"
            )
        _shard_on(strategy.root_device, model, owner.device_mesh, options)


class _DataParallel:
    """Mixin, placed before a Lightning strategy, that makes all ranks data parallel."""

    _data_parallel_size: Any
    num_processes: int
    num_nodes: int

    def setup_environment(self) -> None:
        if self._data_parallel_size == "auto":
            self._data_parallel_size = self.num_processes * self.num_nodes
        super().setup_environment()  # type: ignore[misc]


class ShardedStrategy(_DataParallel, ModelParallelStrategy):
    """Strategy for ``lightning.Trainer``: data parallel, accumulation without communication.

    Args:
        kwargs: arguments of ``ModelParallelStrategy``, such as ``save_distributed_checkpoint``.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(tensor_parallel_size=1, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Disable gradient communication in this context, for all microbatches but the last."""
        assert self.model is not None
        with no_sync(self.model):
            yield


class ShardedFabricStrategy(_DataParallel, FabricStrategy):
    """Strategy for ``lightning.Fabric``: ``fabric.setup(model)`` shards and compiles in place.

    Args:
        save_distributed_checkpoint: whether ``fabric.save`` writes a folder of shards, rather than
            one file with full tensors.
        options: arguments of :func:`graphshard.backend`.
    """

    def __init__(self, *, save_distributed_checkpoint: bool = True, **options: Any) -> None:
        super().__init__(
            self._shard,
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
        )
        self._options = options
        self._backward_sync_control = _NoSync()

    def _shard(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        _shard_on(self.root_device, model, mesh, self._options)
        return model


class _NoSync(BackwardSyncControl):
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        return no_sync(module) if enabled else nullcontext()


def _shard_on(
    device: torch.device, model: nn.Module, mesh: DeviceMesh, options: Mapping[str, Any]
) -> None:
    options = {"mesh": mesh["data_parallel"], **options}
    dynamo_backend = backend(**options)
    if may_be_moved(model, options):  # Lightning itself materializes a meta-device model later
        model.to(device)
    shard_and_compile(model, dynamo_backend, options)
