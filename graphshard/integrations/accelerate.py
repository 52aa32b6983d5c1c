"""Hugging Face Accelerate: a ``prepare`` function that shards the model with graphshard.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)               # DDP
    model, optimizer, loader = prepare(accelerator, model, optimizer, loader)              # this

    accelerator.log(metrics(model, steps=10), step)      # times, memory, bytes, for any tracker

Accelerate wraps a model in DDP, or rejects one with DTensors, unless the model is marked as
prepared. So ``Accelerator.prepare_model`` first prepares the model for evaluation (device, autocast
for ``mixed_precision``), which marks it; then the model is sharded and compiled in place. The
accelerator's class is replaced by a subclass, because the original would save only the first
rank's shards. Based on Accelerate 1.15: ``accelerator.py``, ``checkpointing.py``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import nn
from torch.optim import Optimizer

from ..dynamo_backend import backend
from ..params.clip_grad import clip_grad_norm_
from ..params.grad_sync import sync_accumulated
from ..params.state_dict import full_state_dict
from .common import (
    is_sharded,
    is_split,
    load_sharded,
    may_be_moved,
    save_sharded,
    shard_and_compile,
)
from .common import metrics as metrics

# Subfolder of a ``save_state`` folder with the checkpoint of the first sharded model; for others, a
# number is appended to the name.
FOLDER = "graphshard"

_PLAIN = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)


def prepare(accelerator: Accelerator, model: nn.Module, *others: Any, **options: Any) -> Any:
    """Shard and compile ``model``, and have Accelerate prepare ``others``.

    ``accumulate``, ``no_sync``, ``backward``, ``clip_grad_norm_``, ``autocast`` and
    ``unwrap_model`` then work as usual. ``save_state`` and ``load_state`` write and read one folder
    on all ranks; a different number of ranks can load it. ``get_state_dict`` and ``save_model``
    gather full tensors on the first rank; all ranks must call them, as under FSDP.

    Args:
        accelerator: accelerator without a sharding strategy, ``parallelism_config``, compiler or
            fp8.
        model: model on any device, including ``meta``, or already sharded by
            :func:`graphshard.shard`. Call ``prepare`` once per model.
        others: optimizers of the model (made before or after sharding), schedulers and data
            loaders.
        options: arguments of :func:`graphshard.backend`.

    Returns:
        The result of ``Accelerator.prepare(model, *others)``. The model is the same object.

    Raises:
        ValueError: the accelerator uses a sharding strategy, ``parallelism_config``, compiler or
            fp8; ``model`` is not a module, or tensor parallelism has split it; one of ``others`` is
            a module; or :func:`graphshard.backend` rejects an option.
    """
    _check(accelerator, model, others)
    dynamo_backend = backend(**options)
    if not isinstance(accelerator, ShardedAccelerator):
        kind = type(accelerator)
        accelerator.__class__ = type(kind.__name__, (ShardedAccelerator, kind), {})
        accelerator.register_save_state_pre_hook(accelerator._save_sharded)
        accelerator.register_load_state_pre_hook(accelerator._load_sharded)
    placed = None if may_be_moved(model, options) else False
    attributes = dict(vars(model))
    accelerator.prepare_model(model, device_placement=placed, evaluation_mode=True)
    try:
        shard_and_compile(model, dynamo_backend, options)
    except BaseException:
        accelerator._models.remove(model)
        vars(model).clear()
        vars(model).update(attributes)  # without Accelerate's mark and forward
        raise
    return accelerator.prepare(model, *others)


def _check(accelerator: Accelerator, model: object, others: tuple[object, ...]) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}: pass the nn.Module to train")
    kind, how = accelerator.distributed_type, "pass arguments of graphshard.backend to prepare"
    # Accelerate silently ignores FSDP on CPUs, so ``distributed_type`` does not show it.
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        kind = DistributedType.FSDP
    if kind not in _PLAIN:
        raise ValueError(
            f"the accelerator has distributed_type={kind.value}, but graphshard shards the "
            f"model itself and needs one of {', '.join(plain.value for plain in _PLAIN)}: turn the "
            f"strategy off in Accelerator(...) or accelerate config, and {how}"
        )
    compiler = accelerator.state.dynamo_plugin.backend
    if compiler.value != "NO":
        raise ValueError(
            f"the accelerator has dynamo_backend={compiler.value}, but graphshard compiles the "
            "model itself: do not set dynamo_backend or, in a Trainer's arguments, torch_compile"
        )
    if is_split(model):
        raise ValueError(
            f"tensor or expert parallelism has split {type(model).__name__}, but Accelerate treats "
            "all ranks as replicas, each with its own batch. Do not split the model, or train it "
            "with torchtitan, Lightning or your own loop"
        )
    if accelerator.parallelism_config is not None:
        raise ValueError(f"the accelerator has a parallelism_config: remove it, and {how}")
    if accelerator.mixed_precision == "fp8":
        raise ValueError(
            "the accelerator has mixed_precision='fp8': use 'bf16', and pass "
            "fp8=graphshard.Float8Policy() to prepare"
        )
    for other in others:
        if isinstance(other, nn.Module):
            raise ValueError(
                f"others contains a {type(other).__name__}: prepare one model per call"
            )


class ShardedAccelerator(Accelerator):
    """Mixin that :func:`prepare` adds to the class of the user's accelerator."""

    _models: list[Any]
    _optimizers: list[Any]
    # Sharded models and their optimizers, while ``save_state`` or ``load_state`` runs.
    _sharded: dict[nn.Module, list[Optimizer]] | None = None

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Return a state dict: for a sharded model, full on the first rank and empty on others.

        During ``save_state``, which saves shards, it is empty on all ranks.
        """
        if not is_sharded(model):
            return super().get_state_dict(model, unwrap)
        return full_state_dict(model) if self._sharded is None else {}

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Any:
        """Clip gradients with :func:`graphshard.clip_grad_norm_`, which supports several meshes."""
        parameters = list(parameters)
        self.unscale_gradients()
        return clip_grad_norm_(parameters, max_norm, norm_type)

    @staticmethod
    @contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        """Reduce gradients after the backward in this context, even of forwards in ``no_sync``."""
        with Accelerator.trigger_sync_in_backward(model):
            yield
        if is_sharded(model):
            sync_accumulated(model)

    def save_state(self, *args: Any, **kwargs: Any) -> str:
        """Save as Accelerate does, except that all ranks save sharded models and their optimizers.

        Raises:
            ValueError: an optimizer has parameters of a sharded model and others.
        """
        with self._sharded_apart():
            folder: str = super().save_state(*args, **kwargs)
        self.wait_for_everyone()
        return folder

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Load a folder written by ``save_state``, possibly on a different number of ranks.

        Raises:
            ValueError: as ``save_state``, or the folder has no checkpoint of a sharded model.
        """
        with self._sharded_apart():
            super().load_state(*args, **kwargs)

    def _save_sharded(self, models: list[nn.Module], weights: list[Any], folder: str) -> None:
        """Save sharded models in a hook of ``save_state``; Accelerate saves the others."""
        for path, model, optimizers in self._folders(folder):
            save_sharded(path, model, optimizers)
        weights[:] = [state for model, state in zip(models, weights) if not is_sharded(model)]

    def _load_sharded(self, models: list[nn.Module], folder: str) -> None:
        """Load sharded models in a hook of ``load_state``; Accelerate loads the others."""
        for path, model, optimizers in self._folders(folder):
            load_sharded(path, model, optimizers)
        models[:] = [model for model in models if not is_sharded(model)]

    def _folders(self, folder: str) -> Iterator[tuple[Path, nn.Module, list[Optimizer]]]:
        assert self._sharded is not None
        for number, (model, optimizers) in enumerate(self._sharded.items()):
            yield Path(folder, f"{FOLDER}_{number}" if number else FOLDER), model, optimizers

    @contextmanager
    def _sharded_apart(self) -> Iterator[None]:
        """Hide the optimizers of sharded models from Accelerate while it saves or loads."""
        sharded: dict[nn.Module, list[Optimizer]] = {m: [] for m in self._models if is_sharded(m)}
        owner = {param: model for model in sharded for param in model.parameters()}
        plain: list[Any] = []
        for optimizer in self._optimizers:
            inner = (
                optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
            )
            models = {owner.get(p) for group in inner.param_groups for p in group["params"]}
            if len(models) > 1:
                raise ValueError(
                    f"{type(inner).__name__} has parameters of a sharded model and "
                    "of something else: to save or load its state, use a separate optimizer "
                    "for each sharded model"
                )
            model = next(iter(models), None)
            if model is None:
                plain.append(optimizer)
            else:
                sharded[model].append(inner)
        all_optimizers = self._optimizers
        self._sharded, self._optimizers = sharded, plain
        try:
            yield
        finally:
            self._sharded, self._optimizers = None, all_optimizers
