"""Hugging Face Accelerate: a ``prepare`` that has graphshard shard the model.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)               # DDP
    model, optimizer, loader = prepare(accelerator, model, optimizer, loader)              # this

Accelerate wraps a model in DDP, or refuses one of DTensors, unless it counts the model as prepared.
So ``Accelerator.prepare_model`` first prepares the model as for evaluation (device, autocast by
``mixed_precision``), which marks it as prepared; then the model is sharded and compiled in place.
The accelerator's class is replaced by a subclass, because the original would save only the first
rank's shards. Based on Accelerate 1.15: ``accelerator.py``, ``checkpointing.py``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import nn
from torch.optim import Optimizer

from ..dynamo_backend import backend
from ..params.full_state_dict import full_state_dict
from .compiled_in_place import is_sharded, may_be_moved, shard_and_compile
from .generation import generate_together
from .sharded_checkpoint import load_sharded, save_sharded

FOLDER = "graphshard"
"""Subfolder of a ``save_state`` folder with the checkpoint of the first sharded model; other models
append a number to the name."""

_PLAIN = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)


def prepare(accelerator: Accelerator, model: nn.Module, *others: Any, **options: Any) -> Any:
    """Shard and compile ``model``, and have Accelerate prepare ``others``.

    ``accumulate``, ``no_sync``, ``backward``, ``clip_grad_norm_``, ``autocast`` and
    ``unwrap_model`` then work as usual. ``save_state`` and ``load_state`` write and read one folder
    on all ranks; a different number of ranks can load it. ``get_state_dict`` and ``save_model``
    gather full tensors on the first rank; all ranks must call them, as under FSDP.

    Args:
        accelerator: accelerator without a sharding strategy, compiler or fp8 of its own.
        model: model on any device, including ``meta``, or already sharded by
            :func:`graphshard.shard`. Call ``prepare`` once per model.
        others: optimizers of the model (made before or after sharding), schedulers and data
            loaders.
        options: arguments of :func:`graphshard.backend`.

    Returns:
        The result of ``Accelerator.prepare(model, *others)``. The model is the same object.

    Raises:
        ValueError: the accelerator has a sharding strategy, compiler or fp8 of its own, one of
            ``others`` is a module, or :func:`graphshard.backend` refuses an option.
    """
    _check(accelerator, model, others)
    dynamo_backend = backend(**options)
    if not isinstance(accelerator, ShardedAccelerator):
        kind = type(accelerator)
        accelerator.__class__ = type(kind.__name__, (ShardedAccelerator, kind), {})
        accelerator.register_save_state_pre_hook(_drop_sharded_weights)
        accelerator.register_load_state_pre_hook(_drop_sharded_models)
    placed = None if may_be_moved(model, options) else False
    accelerator.prepare_model(model, device_placement=placed, evaluation_mode=True)
    shard_and_compile(model, dynamo_backend, options)
    generate_together(model)
    return accelerator.prepare(model, *others)


def _check(accelerator: Accelerator, model: object, others: tuple[object, ...]) -> None:
    """Raise ValueError if a setting or an argument prevents graphshard from sharding ``model``."""
    kind, how = accelerator.distributed_type, "leave it to graphshard.backend's arguments"
    # Accelerate silently ignores FSDP on CPUs, so ``distributed_type`` does not show it.
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        kind = DistributedType.FSDP
    if kind not in _PLAIN:
        raise ValueError(
            f"the accelerator is set to {kind.value}, which shards models itself: {how}"
        )
    compiler = accelerator.state.dynamo_plugin.backend
    if compiler.value != "NO":
        raise ValueError(
            f"the accelerator has dynamo_backend={compiler.value}: graphshard compiles "
            "the model; leave dynamo_backend unset (in a Trainer: torch_compile)"
        )
    if accelerator.parallelism_config is not None:
        raise ValueError(f"the accelerator has a parallelism_config: {how}")
    if accelerator.mixed_precision == "fp8":
        raise ValueError(
            "the accelerator has mixed_precision='fp8': use 'bf16' and, for graphshard, "
            "fp8=graphshard.Float8Policy()"
        )
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}: give the module first")
    for other in others:
        if isinstance(other, nn.Module):
            raise ValueError(f"one model for each call: prepare {type(other).__name__} by another")


class ShardedAccelerator(Accelerator):
    """Accelerator with sharded models; `prepare` turns an ``Accelerator`` into one."""

    _models: list[Any]
    _optimizers: list[Any]
    _saves_state = False

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Return a model's state dict: if sharded, full on the first rank and empty on others."""
        if not is_sharded(model):
            return super().get_state_dict(model, unwrap)
        return {} if self._saves_state else full_state_dict(model)

    def save_state(self, *args: Any, **kwargs: Any) -> str:
        """Save everything; all ranks write the sharded models and their optimizers."""
        optimizers = self._optimizers_by_model()
        self._saves_state = True
        try:
            with self._plain_optimizers(optimizers):
                folder: str = super().save_state(*args, **kwargs)
        finally:
            self._saves_state = False
        for path, model in self._folders(Path(folder)):
            save_sharded(path, model, optimizers[model])
        self.wait_for_everyone()
        return folder

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Load what `save_state` saved, on any number of ranks."""
        optimizers = self._optimizers_by_model()
        folder = Path(input_dir) if input_dir is not None else self._newest_folder()
        for path, model in self._folders(folder):
            load_sharded(path, model, optimizers[model])
        with self._plain_optimizers(optimizers):
            super().load_state(str(folder), *args, **kwargs)

    def _newest_folder(self) -> Path:
        """Return the latest of the checkpoint folders that Accelerate numbers.

        Raises:
            ValueError: automatic naming is off, or there is no folder yet.
        """
        numbered = self.project_configuration.automatic_checkpoint_naming
        root = Path(self.project_dir or ".", "checkpoints")
        folders = list(root.glob("checkpoint_*")) if numbered else []
        if not folders:
            raise ValueError("give load_state the folder that save_state wrote")
        return max(folders, key=lambda path: int(path.name.rpartition("_")[2]))

    def _folders(self, folder: Path) -> Iterator[tuple[Path, nn.Module]]:
        """Yield each sharded model with its checkpoint folder."""
        for number, model in enumerate(filter(is_sharded, self._models)):
            yield folder / (f"{FOLDER}_{number}" if number else FOLDER), model

    def _optimizers_by_model(self) -> dict[nn.Module, list[Optimizer]]:
        """Return the optimizers of each sharded model.

        Raises:
            ValueError: an optimizer has parameters of several models.
        """
        optimizers: dict[nn.Module, list[Optimizer]] = {
            m: [] for m in self._models if is_sharded(m)
        }
        owner = {param: model for model in optimizers for param in model.parameters()}
        for optimizer in map(_unwrapped, self._optimizers):
            groups = optimizer.param_groups
            models = {owner.get(param) for group in groups for param in group["params"]}
            if len(models) > 1 and any(models):
                raise ValueError(
                    f"{type(optimizer).__name__} has parameters of several models: to save its "
                    "state, give each sharded model an optimizer of its own"
                )
            for model in models - {None}:
                optimizers[model].append(optimizer)  # type: ignore[index]
        return optimizers

    @contextmanager
    def _plain_optimizers(self, by_model: Mapping[nn.Module, list[Optimizer]]) -> Iterator[None]:
        """Have Accelerate save and load only the optimizers of models that are not sharded.

        Args:
            by_model: optimizers of the sharded models.
        """
        all_optimizers = self._optimizers
        sharded = {id(optimizer) for of_model in by_model.values() for optimizer in of_model}
        self._optimizers = [o for o in all_optimizers if id(_unwrapped(o)) not in sharded]
        try:
            yield
        finally:
            self._optimizers = all_optimizers


def _unwrapped(optimizer: Optimizer) -> Optimizer:
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def _drop_sharded_weights(models: list[nn.Module], weights: list[Any], folder: str) -> None:
    """Remove sharded models from the state that Accelerate saves; a hook of ``save_state``."""
    weights[:] = [state for model, state in zip(models, weights) if not is_sharded(model)]


def _drop_sharded_models(models: list[nn.Module], folder: str) -> None:
    """Remove sharded models from those that Accelerate loads; a hook of ``load_state``."""
    models[:] = [model for model in models if not is_sharded(model)]
