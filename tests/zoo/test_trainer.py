"""`graphshard.integrations.transformers.ShardedTrainer`, compared with `Trainer` under DDP."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import (
    AutoModelForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.distributed import DistributedConfig
from transformers.utils import logging

import graphshard
from graphshard.integrations.accelerate import prepare
from graphshard.integrations.peft import adapter_state_dict
from graphshard.integrations.transformers import (
    ShardedTrainer,
    ShardedTrainerMixin,
    _load_renamed,
    from_pretrained,
)
from graphshard.params.sharded_param import sharded_param_of
from tests import ranks
from tests.numerics.compare import graphshard_warnings, relative_error, whole
from tests.ranks import on_ranks

from .launched import Kept, Texts, as_by_torchrun, same, scalars, small_llama
from .models import mixtral, t5

STEPS = 6
SHARDING: dict[str, Any] = {"compiler": "aot_eager"}


def _trainer(
    folder: str,
    model: nn.Module | None = None,
    *,
    plain: bool = False,
    held_out: int = 9,
    **kwargs: Any,
) -> Trainer:
    as_by_torchrun()
    logging.set_verbosity_error()
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "output_dir": folder,
        "use_cpu": True,
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    } | kwargs
    arguments = TrainingArguments(**settings)
    model = small_llama() if model is None else model
    data = {"train_dataset": Texts(64), "eval_dataset": Texts(held_out)}
    if plain:
        return Trainer(model, arguments, **data)
    return ShardedTrainer(model, arguments, sharding=SHARDING, backend_metrics=True, **data)


def _weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    params = trainer.model.named_parameters()
    return {name: whole(param) for name, param in params}


def _history(trainer: Trainer, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def _numbers(folder: str, plain: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    logs = {} if plain else {"report_to": "tensorboard", "include_num_input_tokens_seen": True}
    trainer = _trainer(folder, plain=plain, optim="sgd", **logs)
    with graphshard_warnings() as texts:
        trainer.train()
    assert not texts, texts  # the model is one graph
    assert any(map(sharded_param_of, trainer.model.parameters())) != plain
    if not plain:
        for key in ("step_s", "mfu", "tokens_per_s"):  # the first log starts the clock
            values = _history(trainer, f"graphshard/{key}")
            assert len(values) == STEPS - 1 and min(values) > 0
    numbers = {key: _history(trainer, key) for key in ("loss", "grad_norm")}
    numbers["eval_loss"] = [trainer.evaluate()["eval_loss"]]
    weights = {n.removeprefix("module."): value for n, value in _weights(trainer).items()}
    return {key: torch.tensor(values) for key, values in numbers.items()}, weights


def compare_with_ddp(folder: str) -> dict[str, float]:
    (ours, trained), (theirs, expected) = (_numbers(folder, plain) for plain in (False, True))
    errors = {key: float(((ours[key] - of) / of).abs().max()) for key, of in theirs.items()}
    worst = max(relative_error(trained[name], value) for name, value in expected.items())
    return errors | {"weights": worst}


def test_trainer_trains_and_evaluates_like_ddp(tmp_path: Path) -> None:
    for errors in ranks.run(2, compare_with_ddp, str(tmp_path)):
        assert max(errors.values()) <= 1e-5, errors
    logged = scalars(tmp_path)
    assert {"train/loss", "train/graphshard/measured_exposure"} <= logged.keys(), logged


class CountsLabels(nn.Module):
    """Model whose loss is the number of labels in the batches of a step, on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, labels: Tensor, **kwargs: Any) -> dict[str, Tensor]:
        return {"loss": 0 * self.weight.float().sum() + kwargs["num_items_in_batch"]}


@on_ranks(2)
def test_number_of_labels_is_not_rounded(tmp_path: Path) -> None:
    as_by_torchrun()
    arguments = TrainingArguments(
        str(tmp_path), use_cpu=True, per_device_train_batch_size=1, report_to="none"
    )
    policy = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16), **SHARDING}
    trainer = ShardedTrainer(CountsLabels(), arguments, sharding=policy)
    model = trainer._wrap_model(trainer.model)
    batch = {"labels": torch.zeros(1, 128 + dist.get_rank(), dtype=torch.int64)}
    (batch,), number = trainer.get_batch_samples(iter([batch]), 1, torch.device("cpu"))
    # More digits than bfloat16 has.
    assert model(**batch, num_items_in_batch=number)["loss"] == 128 + 129


def pretrained_both_ways(folder: str) -> bool:
    """Return whether a model sharded on loading trains bitwise like one that is loaded in full."""
    found = []
    for model in (
        AutoModelForCausalLM.from_pretrained(folder),
        from_pretrained(AutoModelForCausalLM, folder),
    ):
        trainer = _trainer(f"{folder}/out", model, max_steps=2, gradient_accumulation_steps=1)
        trainer.train()
        found.append((_history(trainer, "loss"), _weights(trainer)))
    (losses, weights), (expected_losses, expected) = found
    return losses == expected_losses and same(weights, expected)


def test_trainer_trains_model_loaded_as_shards(tmp_path: Path) -> None:
    small_llama().save_pretrained(tmp_path)
    assert all(ranks.run(2, pretrained_both_ways, str(tmp_path)))


def save_and_resume(folder: str, build: Callable[[], nn.Module] = small_llama) -> Kept:
    saving: dict[str, Any] = {
        "held_out": 8,  # equal batch sizes: evaluation needs one graph
        "save_strategy": "steps",
        "eval_strategy": "steps",
        "save_steps": 2,
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "gradient_accumulation_steps": 1,
    }
    torch.manual_seed(0)
    first = _trainer(folder, build(), **saving)
    first.train()
    best = AutoModelForCausalLM.from_pretrained(str(first.state.best_model_checkpoint))
    saved = same(_weights(first), best)
    again = _trainer(folder, build(), **saving)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    dist.barrier()
    resumed = _history(again, "loss") == _history(first, "loss")
    again.save_model(f"{folder}/end")
    dist.barrier()
    end = AutoModelForCausalLM.from_pretrained(f"{folder}/end")
    return Kept(saved and same(_weights(again), end), resumed and same(_weights(again), best))


# The names in a Mixtral's checkpoint are not those of its parameters: experts are saved separately.
@pytest.mark.parametrize("build", [small_llama, mixtral])
def test_trainer_saves_resumes_and_loads_best_checkpoint(
    tmp_path: Path, build: Callable[[], nn.Module]
) -> None:
    assert ranks.run(2, save_and_resume, str(tmp_path), build) == [Kept(True, True)] * 2


class SlowEvaluation(TrainerCallback):
    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(1)


@on_ranks(1)
def test_logged_time_of_step_leaves_out_evaluation(tmp_path: Path) -> None:
    evaluates: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 3}
    trainer = _trainer(str(tmp_path), **evaluates)
    trainer.add_callback(SlowEvaluation())
    trainer.train()
    assert min(_history(trainer, "graphshard/step_s")) < 1


def test_incomplete_checkpoint_with_other_names_is_refused(tmp_path: Path) -> None:
    model = mixtral()
    model.save_pretrained(tmp_path)
    model.scores = nn.Linear(3, 4)
    with pytest.raises(ValueError, match=r"does not load 2 .* as 'scores\.bias'"):
        _load_renamed(model, str(tmp_path))


def _start_again(trainer: Trainer) -> None:
    """Begin training again, as `train` does, after a microbatch whose gradients are not reduced."""
    model = trainer.model
    with model.no_sync():
        model(**torch.utils.data.default_collate([Texts(2)[0]])).loss.backward()
    params = list(filter(None, map(sharded_param_of, model.parameters())))
    assert any(param.unreduced_totals() for param in params)
    assert not _input_hooks(model)
    model.enable_input_require_grads()
    assert _input_hooks(model)
    trainer._wrap_model(model)
    assert not any(param.unreduced_totals() for param in params) and not _input_hooks(model)


def _input_hooks(model: nn.Module) -> list[Any]:
    hooks = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    return [hook for hook in hooks if hook.__name__ == "make_inputs_require_grads"]


def _adapters(folder: str) -> None:
    def adapted() -> Any:
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        torch.manual_seed(1)
        return peft.get_peft_model(small_llama(), config)

    saving = {
        "save_strategy": "steps",
        "save_steps": 3,
        "gradient_checkpointing": True,
        "gradient_accumulation_steps": 1,
    }
    first = _trainer(folder, adapted(), **saving)
    with graphshard_warnings() as texts:
        first.train()
    assert not texts, texts  # the model is one graph
    _start_again(first)
    again = _trainer(folder, adapted(), **saving)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    weights = _weights(first)
    assert all(torch.equal(value, weights[name]) for name, value in _weights(again).items())
    dist.barrier()
    torch.manual_seed(1)
    plain = peft.PeftModel.from_pretrained(small_llama(), f"{folder}/checkpoint-{STEPS}")
    loaded = dict(plain.named_parameters())
    first.model.save_pretrained(f"{folder}/saved", is_main_process=dist.get_rank() == 0)
    dist.barrier()
    saved = dict(
        peft.PeftModel.from_pretrained(small_llama(), f"{folder}/saved").named_parameters()
    )
    assert same({name: saved[name] for name in saved if "lora_" in name}, loaded)
    fails = mock.patch(
        "graphshard.params.save_pretrained._saved_names", side_effect=OSError("no base")
    )
    is_first = dist.get_rank() == 0  # all ranks raise peft's error on the first rank
    with fails, pytest.raises(OSError if is_first else ValueError, match="no base"):
        adapter_state_dict(first.model)
    adapters = [name for name in weights if "lora_" in name]
    state = adapter_state_dict(first.model)  # contains only the adapters
    assert set(state) == (set(adapters) if dist.get_rank() == 0 else set())
    assert adapters and all(torch.equal(weights[name], loaded[name]) for name in adapters)


def test_adapters_with_activation_checkpointing_resume(tmp_path: Path) -> None:
    ranks.run(2, _adapters, str(tmp_path))


@on_ranks(2)
def test_trainer_clips_by_norm_of_parameters_on_all_meshes(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("efsdp", "ep"))
    dp, overrides = mesh["efsdp", "ep"]._flatten("dp"), {"1": {"mesh": mesh["efsdp"]}}
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    trainer: Any = _trainer(str(tmp_path), model)
    trainer.sharding = {"mesh": dp, "overrides": overrides}
    trainer._wrap_model(model)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    # Both ranks together have the 16 elements of one linear; each has its own 25 of the other.
    assert float(trainer._clip_grad_norm(model)) == pytest.approx((16 + 2 * 25) ** 0.5)


def _refuse(folder: str) -> None:
    with pytest.raises(ValueError, match="sharding='full': must be a dict of arguments"):
        ShardedTrainer(small_llama(), sharding="full")  # type: ignore[arg-type]
    for name, value in (("fsdp", "full_shard"), ("fsdp", True), ("fsdp_config", {"version": 2})):
        with pytest.raises(ValueError, match=f"{name}=.*: graphshard already shards the model"):
            _trainer(folder, **{name: value})
    by_launcher = mock.patch.dict(os.environ, ACCELERATE_USE_FSDP="true")
    with (
        by_launcher,
        pytest.raises(ValueError, match="distributed_type=FSDP, but graphshard"),
    ):
        _trainer(folder).train()
    with pytest.raises(ValueError, match="dynamo_backend=INDUCTOR, but graphshard compiles"):
        _trainer(folder, torch_compile=True).train()
    with pytest.raises(ValueError, match="save_on_each_node=True"):
        _trainer(folder, save_on_each_node=True).train()
    with pytest.raises(ValueError, match='optim="adafactor"'):
        _trainer(folder, optim="adafactor").train()
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(
        ValueError, match="PROMPT_TUNING: to save it, peft reads its prompt encoder on one rank"
    ):
        _trainer(folder, peft.get_peft_model(small_llama(), prompts)).train()


@on_ranks(2)
def test_adapters_on_unnamed_mesh_are_refused(tmp_path: Path) -> None:
    loads: dict[str, Any] = {
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "eval_steps": 1,
        "save_steps": 1,
        "max_steps": 1,
        "load_best_model_at_end": True,
    }
    model: Any = peft.get_peft_model(small_llama(), peft.LoraConfig(target_modules=["q_proj"]))
    trainer: Any = _trainer(str(tmp_path), model, **loads)
    trainer.sharding = {"mesh": init_device_mesh("cpu", (1, 2)), **SHARDING}
    with pytest.raises(ValueError, match="mesh has no mesh_dim_names"):
        trainer.train()


def test_conflicting_trainer_arguments_are_refused(tmp_path: Path) -> None:
    ranks.run(1, _refuse, str(tmp_path))


@on_ranks(2)
def test_model_that_transformers_splits_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "whole"
    if dist.get_rank() == 0:
        small_llama().save_pretrained(folder)
    dist.barrier()
    as_by_torchrun()
    config = DistributedConfig(tp_size=2, tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
    with pytest.raises(ValueError, match="both meshes must be slices of one mesh"):
        graphshard.shard(model)


@pytest.mark.parametrize("adapted", [False, True])
@on_ranks(2)
def test_ranks_generate_texts_of_different_lengths(adapted: bool) -> None:
    torch.manual_seed(0)
    model: Any = small_llama()
    if adapted:
        config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model, config)
    plain = copy.deepcopy(model)
    if adapted:
        as_by_torchrun()
        prepare(Accelerator(cpu=True), model, **SHARDING)
    else:
        model = copy.deepcopy(graphshard.shard(model))
    rank = dist.get_rank()
    ids = torch.tensor([[5, 6, 7 + rank]])
    settings: dict[str, Any] = {"do_sample": False, "min_new_tokens": 4 + 3 * rank}
    settings["max_new_tokens"] = settings["min_new_tokens"]
    said = model.eval().generate(input_ids=ids, **settings)
    expected = plain.eval().generate(input_ids=ids, **settings)
    assert said.tolist() == expected.tolist() and said[0, 3:].unique().numel() > 1


class ShardedSeq2SeqTrainer(ShardedTrainerMixin, Seq2SeqTrainer):
    """Seq2SeqTrainer with the mixin as its first base class."""


def _already_sharded(folder: str) -> None:
    model = t5()
    graphshard.shard(model, **SHARDING)
    as_by_torchrun()
    arguments = Seq2SeqTrainingArguments(
        folder,
        use_cpu=True,
        max_steps=1,
        per_device_eval_batch_size=1,
        predict_with_generate=True,
        generation_max_length=4,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = ShardedSeq2SeqTrainer(model, arguments, train_dataset=Texts(8), sharding=SHARDING)
    length = 2 + dist.get_rank()
    lengths = {"min_new_tokens": length, "max_new_tokens": length}
    assert trainer.predict(Texts(4), **lengths).predictions.shape[0] == 4
    trainer.train()
    assert trainer.predict(Texts(4)).predictions.shape[0] == 4


def test_already_sharded_model_trains_and_generates(tmp_path: Path) -> None:
    ranks.run(2, _already_sharded, str(tmp_path))
