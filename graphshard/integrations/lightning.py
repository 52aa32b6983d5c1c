"""Lightning: strategies for Trainer and Fabric, and ``configure`` for a LightningModule.

    class Model(LightningModule):
        def configure_model(self):                        # Lightning calls it before training
            configure(self, self.net, mp_policy=policy)   # shards self.net over all ranks

    Trainer(strategy=ShardedStrategy(), accelerator="auto", devices=8)
    Fabric(strategy=ShardedFabricStrategy(mp_policy=policy), devices=8)

    Trainer(callbacks=[LogMetrics()])                     # times, memory, bytes, for any logger
    fabric.log_dict(metrics(model, steps=10))

Both strategies are Lightning's ``ModelParallelStrategy``, which saves DTensors (one folder written
by all ranks, or one file) and leaves sharding to the user, with four changes:

- Data parallel size "auto" is the number of ranks divided by ``tensor_parallel_size`` (1 by
  default). Lightning's "auto" sizes would shard nothing on one node.
- Accumulated microbatches reduce no gradients, which Lightning supports only for DDP and FSDP2.
- Gradients on several meshes can be clipped, as by :func:`graphshard.clip_grad_norm_`.
- ``ShardedStrategy`` does not move sharded parameters: CPU offload keeps them on the host.

For tensor parallelism, pass ``tensor_parallel_size`` to the strategy, and a function that splits
the model (``Parallelize``) to ``configure`` or to the Fabric strategy.

Based on Lightning 2.6: ``pytorch/strategies/parallel.py``, ``pytorch/strategies/model_parallel.py``
and ``fabric/strategies/model_parallel.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import signature
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy as FabricStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl as BackwardSyncControl
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from .._torch.nn import move_plain_tensors
from ..dynamo_backend import backend
from ..params.clip_grad import clip_grad_norm_
from ..params.grad_sync import no_sync
from ..params.shard import repoint_param_groups
from .common import is_sharded, is_split, may_be_moved, shard_and_compile
from .common import metrics as metrics

Parallelize = Callable[[nn.Module, DeviceMesh], nn.Module]
"""``parallelize(model, mesh)``: splits ``model`` in place over ``mesh["tensor_parallel"]``, and
returns it, as the ``parallelize_fn`` of Lightning's Fabric strategy does."""


def configure(
    owner: LightningModule,
    model: nn.Module,
    *,
    parallelize_fn: Parallelize | None = None,
    **options: Any,
) -> None:
    """Shard and compile a module of ``owner``; call this in ``configure_model``.

    Lightning calls ``configure_model`` again for validation and for each further ``fit``; modules
    that are already sharded do not change.

    Args:
        owner: LightningModule attached to a Trainer.
        model: module that ``training_step`` calls; not ``owner``, whose forward Lightning does not
            call in training.
        parallelize_fn: function that applies tensor parallelism before ``model`` is sharded.
        options: arguments of :func:`graphshard.backend`; the mesh defaults to the strategy's axis
            ``data_parallel``.

    Raises:
        ValueError: ``model`` is ``owner``, the Trainer's strategy has no mesh (DDP, FSDP),
            ``parallelize_fn`` returns another module, the strategy's ``tensor_parallel_size`` is
            more than 1 but no parameter is split, or :func:`graphshard.backend` rejects an option.
    """
    if model is owner:
        raise ValueError(
            "configure() got the LightningModule itself, whose forward Lightning does not call in "
            "training: pass the module that training_step calls, such as self.net"
        )
    if not is_sharded(model):
        strategy = owner.trainer.strategy
        if owner.device_mesh is None:
            raise ValueError(
                f"the Trainer's strategy, {type(strategy).__name__}, has no mesh: use "
                "strategy=ShardedStrategy() from graphshard.integrations.lightning"
            )
        _shard_on(strategy.root_device, model, owner.device_mesh, parallelize_fn, options)


class _DataParallel:
    """Mixin that makes a strategy's "auto" data parallel size use all ranks.

    List it before the strategy among the base classes.
    """

    _data_parallel_size: Any
    _tensor_parallel_size: Any
    num_processes: int
    num_nodes: int

    def setup_environment(self) -> None:
        if self._data_parallel_size == "auto":
            num_ranks = self.num_processes * self.num_nodes
            self._data_parallel_size = num_ranks // self._tensor_parallel_size
        super().setup_environment()  # type: ignore[misc]


class ShardedStrategy(_DataParallel, ModelParallelStrategy):
    """Strategy for ``lightning.Trainer`` with modules that :func:`configure` shards.

    Args:
        tensor_parallel_size: number of ranks over which tensor parallelism splits the model. If it
            is more than 1, :func:`configure` needs a ``parallelize_fn``.
        kwargs: arguments of ``ModelParallelStrategy``, such as ``save_distributed_checkpoint``.
    """

    def __init__(self, *, tensor_parallel_size: int = 1, **kwargs: Any) -> None:
        super().__init__(tensor_parallel_size=tensor_parallel_size, **kwargs)

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        precision: Any = self.precision_plugin

        def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
            clip_grad_norm_(precision.main_params(optimizer), clip_val)

        precision.clip_grad_by_norm = clip_grad_by_norm

    def model_to_device(self) -> None:
        """Move the model to this rank's device, except sharded parameters, which are in place."""
        assert self.model is not None
        _update_properties(self.model, device=self.root_device)  # as ``LightningModule.to`` does
        move_plain_tensors(self.model, self.root_device)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Defer gradient reduction; Lightning enters this for all microbatches but the last."""
        assert self.model is not None
        with no_sync(self.model):
            yield


class LogMetrics(Callback):
    """Callback that logs :meth:`graphshard.Backend.metrics` every ``log_every_n_steps`` steps.

    Args:
        tokens_per_step: number of tokens of all ranks in an optimizer step, for ``tokens_per_s``.
    """

    def __init__(self, tokens_per_step: int | None = None) -> None:
        self._tokens_per_step = tokens_per_step
        self._logged = self._since = 0  # last logged step; first step that the next log measures
        self._paused = False  # by validation or a save, since the last training batch

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        self._paused, self._logged = True, trainer.global_step

    def on_validation_end(self, *_: Any) -> None:
        self._paused = True

    def on_save_checkpoint(self, *_: Any) -> None:
        self._paused = True

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self._paused:  # leave the pause out of the next ``step_s``
            self._paused, self._since = False, trainer.global_step
            metrics(pl_module, steps=1)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        step, steps = trainer.global_step, trainer.global_step - self._since
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if not every or not steps or step - self._logged < every:
            return
        self._logged = self._since = step
        tokens = None if self._tokens_per_step is None else steps * self._tokens_per_step
        numbers = metrics(pl_module, steps=steps, tokens=tokens)
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=step)


class ShardedFabricStrategy(_DataParallel, FabricStrategy):
    """Strategy for ``lightning.Fabric`` that shards and compiles models in ``fabric.setup``.

    Args:
        parallelize_fn: function that applies tensor parallelism before a model is sharded.
        tensor_parallel_size: number of ranks over which tensor parallelism splits the model.
        options: other arguments of ``ModelParallelStrategy``, such as ``timeout`` and
            ``save_distributed_checkpoint``, and arguments of :func:`graphshard.backend`.

    Raises:
        ValueError: ``options`` has an argument that neither ``ModelParallelStrategy`` nor
            :func:`graphshard.backend` accepts. In ``fabric.setup``: ``parallelize_fn`` returns
            another module, ``tensor_parallel_size`` is more than 1 but no parameter is split, or
            :func:`graphshard.backend` rejects the value of an option.
    """

    def __init__(
        self,
        parallelize_fn: Parallelize | None = None,
        *,
        tensor_parallel_size: int = 1,
        **options: Any,
    ) -> None:
        theirs, ours = (signature(fn).parameters.keys() for fn in (FabricStrategy, backend))
        if unknown := sorted(options.keys() - theirs - ours):
            raise ValueError(
                f"{unknown[0]}={options[unknown[0]]!r}: neither Lightning's ModelParallelStrategy "
                f"nor graphshard.backend accepts this argument: choose from {[*theirs, *ours]}"
            )
        settings = {name: options.pop(name) for name in options.keys() & theirs}
        super().__init__(self._shard, tensor_parallel_size=tensor_parallel_size, **settings)
        self._split, self._options = parallelize_fn, options
        self._backward_sync_control = _NoSync()

    def _shard(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        _shard_on(self.root_device, model, mesh, self._split, self._options)
        return model

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Clip gradients, which may be on several meshes, and return their total norm."""
        self.precision.unscale_gradients(optimizer)
        parameters = self.precision.main_params(optimizer)
        return clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)


class _NoSync(BackwardSyncControl):
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        return no_sync(module) if enabled else nullcontext()


def _shard_on(
    device: torch.device,
    model: nn.Module,
    mesh: DeviceMesh,
    parallelize_fn: Parallelize | None,
    options: Mapping[str, Any],
) -> None:
    options = {"mesh": mesh["data_parallel"], **options}
    dynamo_backend = backend(**options)
    if may_be_moved(model, options):  # Lightning itself materializes a meta-device model later
        model.to(device)
    if parallelize_fn is not None:
        _split(model, mesh, parallelize_fn)
    num_parts = mesh["tensor_parallel"].size()
    if num_parts > 1 and not is_split(model):
        raise ValueError(
            f"tensor_parallel_size={num_parts}, but {type(model).__name__} is not split: pass a "
            "parallelize_fn that calls parallelize_module"
        )
    shard_and_compile(model, dynamo_backend, options)


def _split(model: nn.Module, mesh: DeviceMesh, parallelize_fn: Parallelize) -> None:
    before = dict(model.named_parameters())
    if (split := parallelize_fn(model, mesh)) is not model:
        raise ValueError(
            f"parallelize_fn returned a {type(split).__name__}: it must split the "
            f"{type(model).__name__} in place, and return it"
        )
    # parallelize_module creates new parameters, but Fabric's users create their optimizer earlier.
    new = {before[name]: param for name, param in model.named_parameters() if name in before}
    repoint_param_groups(new)
