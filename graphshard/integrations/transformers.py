"""Hugging Face Trainer: a mixin that shards and compiles the trained model.

    trainer = Trainer(model=model, args=args, ...)               # DDP
    trainer = ShardedTrainer(model=model, args=args, ...)        # this

    class ShardedSFTTrainer(ShardedTrainerMixin, SFTTrainer):    # any other trainer
        pass

The Trainer wraps and prepares its model once, when training begins. At that point the mixin shards
it through ``graphshard.integrations.accelerate``, with the Trainer's accelerator. The plain Trainer
saves only on its first process, which would miss the other ranks' shards. With the mixin, all ranks
gather the model, one parameter at a time, and the first rank writes it as a plain checkpoint; all
ranks write the optimizer. Based on transformers 5.23: ``trainer.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME

from .._torch.nn import remove_forward_hooks
from ..params.module_class import plain_class
from ..params.save_pretrained import is_peft_model, refuse_prompt_learning, saved_state_dict
from ..params.sharded_param import sharded_param_of
from .accelerate import ShardedAccelerator, prepare
from .common import is_sharded, load_sharded, may_be_moved, metrics, save_sharded
from .pretrained import from_pretrained as from_pretrained

# Subfolder of a checkpoint with the optimizer state, saved by ``torch.distributed.checkpoint``.
FOLDER = "graphshard_optimizer"


class ShardedTrainerMixin(Trainer):
    """Mixin that makes a ``Trainer`` shard, save and resume its model; list it before the trainer.

    Args:
        sharding: arguments of :func:`graphshard.backend`, as a dictionary.
        backend_metrics: whether to log :meth:`graphshard.Backend.metrics` together with the loss.
        args, kwargs: arguments of the trainer, which may include an optimizer. The model is sharded
            when training begins. ``gradient_checkpointing``, ``bf16`` and peft models work as
            usual.

    Raises:
        ValueError: ``sharding`` is not a dictionary, or ``args`` has ``fsdp`` or ``fsdp_config``.
            When training begins: ``args`` sets another strategy or compiler (``deepspeed``,
            ``torch_compile``), ``save_on_each_node`` or Adafactor, tensor parallelism has split
            the model, a peft adapter uses prompt learning, or ``load_best_model_at_end`` is set for
            adapters on a 2D mesh whose axes have no names. When a checkpoint is loaded: it lacks
            tensors of the model, and transformers has renamed the others.
    """

    model: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self,
        *args: Any,
        sharding: dict[str, Any] | None = None,
        backend_metrics: bool = False,
        **kwargs: Any,
    ) -> None:
        if not isinstance(sharding, dict | None):
            raise ValueError(
                f"sharding={sharding!r}: must be a dict of arguments of graphshard.backend, or None"
            )
        self.sharding, self._backend_metrics = sharding or {}, backend_metrics
        self._logged_step = self._logged_tokens = 0  # at the last log of metrics
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, but first reject FSDP, which it would set up process-wide."""
        for name in ("fsdp", "fsdp_config"):
            if value := getattr(self.args, name, None):
                raise ValueError(
                    f"{name}={value!r}: graphshard already shards the model; remove {name} from "
                    "TrainingArguments, and pass the arguments of graphshard.backend as "
                    "sharding={...}"
                )
        super().create_accelerator_and_postprocess()

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if may_be_moved(model, self.sharding) and not is_sharded(model):
            super()._move_model_to_device(model, device)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        known = isinstance(self.accelerator, ShardedAccelerator) and is_sharded(model)
        if training and not known:
            _check_args(self.args)
            refuse_prompt_learning(model)
            if self.args.load_best_model_at_end and is_peft_model(model):
                _check_mesh_of_adapters(model, self.sharding.get("mesh"))
            prepare(self.accelerator, model, **self.sharding)
        if training:  # begins, perhaps again: for example with a smaller batch
            checkpointing: Any = self.args.activation_checkpointing_kwargs or {}
            if not checkpointing.get("use_reentrant"):
                _remove_input_hooks(model)
            _drop_unreduced(model)
        return super()._wrap_model(model, training, dataloader)

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        # The Trainer's norm of such gradients leaves out parameters that other ranks have on their
        # own meshes; the accelerator's includes them.
        return not is_sharded(model) and super()._has_mixed_mesh_grads(model)

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        number = super()._get_num_items_in_batch(*args, **kwargs)
        # The Trainer returns an integer in float32, which the casts of ``mp_policy`` would round.
        return number.long() if isinstance(number, torch.Tensor) else number

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self._backend_metrics and "loss" in logs:
            step, tokens = self.state.global_step, int(self.state.num_input_tokens_seen)
            steps = step - self._logged_step  # less than 1 if training has restarted
            counted = {"tokens": tokens - self._logged_tokens} if tokens else {}
            numbers = metrics(self.model, steps=max(1, steps), **counted)
            logs |= numbers if steps > 0 else {}
            self._logged_step, self._logged_tokens = step, tokens
        super().log(logs, start_time)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        # Callbacks reset both afterwards.
        pauses = self.control.should_evaluate or self.control.should_save
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if self._backend_metrics and pauses:  # leave the pause out of the next ``step_s``
            metrics(self.model, steps=1)
            self._logged_step = self.state.global_step
            self._logged_tokens = int(self.state.num_input_tokens_seen)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write the full model on the first rank; all ranks must call this."""
        if state_dict is None and is_sharded(self.model):
            state_dict = saved_state_dict(self.model)
        super()._save(output_dir, state_dict)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        if not _load_renamed(self.model, resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if not _load_renamed(self.model, self.state.best_model_checkpoint):
            super()._load_best_model()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not is_sharded(self.model):
            super()._save_optimizer_and_scheduler(output_dir)
            return
        save_sharded(
            Path(output_dir, FOLDER), self.model, [self.optimizer.optimizer], weights=False
        )
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not is_sharded(self.model):
            super()._load_optimizer_and_scheduler(checkpoint)
        elif Path(checkpoint, TRAINER_STATE_NAME).exists():
            load_sharded(
                Path(checkpoint, FOLDER), self.model, [self.optimizer.optimizer], weights=False
            )
            schedule = torch.load(Path(checkpoint, SCHEDULER_NAME), weights_only=True)
            self.lr_scheduler.load_state_dict(schedule)


def _check_args(args: TrainingArguments) -> None:
    if args.save_on_each_node:
        raise ValueError(
            "save_on_each_node=True: only one rank has the full model; set it to False"
        )
    if args.optim == "adafactor":
        raise ValueError(
            'optim="adafactor": Adafactor mixes plain tensors with sharded ones; use another '
            'optimizer, such as "adamw_torch_fused"'
        )


def _check_mesh_of_adapters(model: nn.Module, mesh: object) -> None:
    """Raise ValueError if transformers, which peft calls, cannot load adapters on a mesh."""
    for used in (mesh, *(getattr(param, "device_mesh", None) for param in model.parameters())):
        if isinstance(used, DeviceMesh) and used.ndim > 1 and used.mesh_dim_names is None:
            raise ValueError(
                "load_best_model_at_end=True: adapters can be loaded only if the axes of a 2D mesh "
                "have names, but the mesh has no mesh_dim_names: pass them to init_device_mesh"
            )


def _load_renamed(model: nn.Module, checkpoint: str | None) -> bool:
    """Load weights that transformers renames or splits when it saves them.

    Returns:
        Whether they were loaded: False if the model's checkpoints have the names of its parameters,
        as ``load_state_dict`` needs them, or only adapters.

    Raises:
        ValueError: the checkpoint lacks some tensors of the model.
    """
    if not isinstance(model, PreTrainedModel) or getattr(model, "peft_config", None):
        return False
    used = vars(model).get("_weight_conversions")  # set by ``from_pretrained``
    if not (used or get_model_conversion_mapping(model, add_legacy=False)):
        return False
    # Parameters may have several dtypes: float32 keeps the values of all of them.
    model_class: Any = plain_class(model)
    loaded, report = model_class.from_pretrained(
        checkpoint, config=model.config, dtype=torch.float32, output_loading_info=True
    )
    missing = {*report["missing_keys"], *(model.state_dict().keys() - loaded.state_dict().keys())}
    if missing:
        raise ValueError(
            f"{type(model).__name__}.from_pretrained({checkpoint!r}) does not load {len(missing)} "
            f"tensors of the trained model, such as {min(missing)!r}: train the model that was "
            "saved, and create all of its modules in its class"
        )
    model.load_state_dict(loaded.state_dict())
    return True


def _remove_input_hooks(model: nn.Module) -> None:
    """Remove the hooks that make embeddings return tensors that require gradients."""
    # Only reentrant checkpointing of a frozen base model needs these hooks. Dynamo cannot trace
    # them: the graph would break in every layer.
    for module in model.modules():
        # Names of the hooks that transformers and peft register.
        for name in ("make_inputs_require_grads", "make_inputs_require_grad"):
            remove_forward_hooks(module, name)


def _drop_unreduced(model: nn.Module) -> None:
    """Drop gradients that were not reduced yet when training stopped, as ``zero_grad`` does."""
    for sharded_param in filter(None, map(sharded_param_of, model.parameters())):
        for stand_in in sharded_param.stand_ins():
            stand_in.grad = None


class ShardedTrainer(ShardedTrainerMixin, Trainer):
    """``transformers.Trainer`` with a sharded and compiled model."""
