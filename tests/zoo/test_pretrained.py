"""Pretrained models: reading checkpoints directly into shards, and saving them.

`graphshard.integrations.transformers.from_pretrained` is compared with transformers' own followed
by `graphshard.shard`: parameters, buffers and RNG state are bitwise equal on every rank.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from huggingface_hub import PyTorchModelHubMixin
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

import graphshard
from graphshard.integrations.accelerate import prepare
from tests import ranks
from tests.ranks import on_ranks

from .launched import as_by_torchrun
from .models import ZOO, causal_batch, gpt2, llama


def _resnet() -> Any:
    import transformers

    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], num_labels=3)
    model = transformers.ResNetForImageClassification(config)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.normal_()
    return model


def _untied() -> Any:
    """Return a GPT-2 with different weights that are tied according to its config."""
    model = gpt2(tie_word_embeddings=False)
    model.config.tie_word_embeddings = True
    return model


@dataclass(frozen=True)
class Case:
    """A checkpoint and how to load it.

    Attributes:
        build: function that builds the saved model.
        cls: name of the class that loads it.
        mesh: shape of the mesh.
        options: arguments of ``graphshard.shard``.
        kwargs: arguments of ``from_pretrained``.
        file_size: maximum size of a file of the checkpoint.
    """

    build: Callable[[], Any]
    cls: str
    mesh: tuple[int, ...] = (2,)
    options: dict[str, Any] = field(default_factory=dict)
    kwargs: dict[str, Any] = field(default_factory=dict)
    file_size: str = "1GB"


CASES: dict[str, Case] = {
    "GPT-2, tied": Case(lambda: gpt2(), "GPT2LMHeadModel"),
    "tied in the config alone": Case(_untied, "GPT2LMHeadModel"),
    "tied Llama on the host": Case(
        lambda: llama(tie_word_embeddings=True),
        "AutoModelForCausalLM",
        options={"offload_policy": CPUOffloadPolicy()},
    ),
    "cast, in several files": Case(
        lambda: llama(), "LlamaForCausalLM", kwargs={"dtype": "bfloat16"}, file_size="20KB"
    ),
    "experts that are fused": Case(
        lambda: ZOO["mixtral"].build(),
        "MixtralForCausalLM",
        options={"overrides": {"*embed_tokens*": {"shard": False}}},
    ),
    "base of a model with a head": Case(lambda: ZOO["bert"].build(), "BertModel"),
    "head on a base": Case(
        lambda: ZOO["bert"].build().bert,
        "BertForSequenceClassification",
        mesh=(4,),
        kwargs={"num_labels": 3},
    ),
    "new values for other shapes": Case(
        lambda: gpt2(),
        "GPT2LMHeadModel",
        kwargs={"n_positions": 16, "ignore_mismatched_sizes": True},
    ),
    "replicas, some float32 in float16": Case(
        lambda: ZOO["t5"].build(),
        "T5ForConditionalGeneration",
        mesh=(2, 2),
        kwargs={"dtype": torch.float16},
    ),
    "buffers, fewer rows than ranks": Case(_resnet, "ResNetForImageClassification", mesh=(4,)),
}


def _state(model: Any) -> dict[str, Tensor]:
    """Return this rank's shards and all buffers, including non-persistent ones."""
    state = dict(model.named_buffers()) | dict(model.state_dict())
    return {
        name: value.to_local() if isinstance(value, DTensor) else value
        for name, value in state.items()
    }


def _facts(model: Any) -> list[Any]:
    return [
        (name, type(p), p.dtype, p.requires_grad, p.shape, p.placements)
        for name, p in model.named_parameters()
    ]


def _loaded_both_ways(name: str, folder: Path) -> None:
    import transformers

    from graphshard.integrations.transformers import from_pretrained

    case, seed = CASES[name], 7 + dist.get_rank()
    cls, mesh = getattr(transformers, case.cls), init_device_mesh("cpu", case.mesh)
    torch.manual_seed(seed)
    theirs = cls.from_pretrained(folder, **case.kwargs)
    after = torch.get_rng_state()
    graphshard.shard(theirs, mesh, **case.options)
    torch.manual_seed(seed)
    ours = from_pretrained(cls, folder, mesh, sharding=case.options, **case.kwargs)
    assert torch.equal(torch.get_rng_state(), after)
    expected, found = _state(theirs), _state(ours)
    assert list(found) == list(expected)
    assert _facts(ours) == _facts(theirs)
    for key, value in expected.items():
        assert found[key].dtype == value.dtype and torch.equal(found[key], value), key
    assert not ours.training and type(ours).__name__ == type(theirs).__name__


@pytest.mark.parametrize("name", CASES)
def test_shards_equal_those_of_the_full_model(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    case.build().save_pretrained(tmp_path, max_shard_size=case.file_size)
    assert (case.file_size == "1GB") == (tmp_path / "model.safetensors").exists()
    ranks.run(math.prod(case.mesh), _loaded_both_ways, name, tmp_path)


def _bytes_read(folder: Path) -> tuple[int, int, int]:
    """Load a Mixtral; return the bytes read by this rank, of its state, and of all parameters."""
    import transformers

    from graphshard.integrations import pretrained

    read, num_bytes = pretrained._read_rows, 0

    def counted(*args: Any) -> Tensor:
        nonlocal num_bytes
        tensor = read(*args)
        num_bytes += tensor.nbytes
        return tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with mock.patch.object(pretrained, "_read_rows", counted):
        model = pretrained.from_pretrained(transformers.MixtralForCausalLM, folder, mesh)
    shards = sum(tensor.nbytes for tensor in _state(model).values())
    return num_bytes, shards, sum(p.nbytes for p in model.parameters())


def test_each_rank_reads_only_its_rows_and_experts(tmp_path: Path) -> None:
    # A Mixtral's four experts are separate tensors in the file, but one in the model.
    ZOO["mixtral"].build().save_pretrained(tmp_path)
    for read, shards, whole in ranks.run(2, _bytes_read, tmp_path):
        assert read <= shards < 0.6 * whole


def test_reading_rows_reads_no_others(tmp_path: Path) -> None:
    from graphshard.integrations import pretrained

    def num_read() -> int:
        (line,) = [one for one in Path("/proc/self/io").read_text().splitlines() if "rchar" in one]
        return int(line.split()[1])

    path, full = tmp_path / "model.safetensors", torch.arange(4e6).view(1000, -1)
    save_file({"other": torch.ones(3), "full": full}, path)
    _, reads = pretrained._open(None, [str(path)], None)
    before = num_read()
    assert torch.equal(reads["full"](slice(998, 1000)), full[998:])
    assert num_read() - before < 1e6
    assert torch.equal(reads["full"](None), full) and len(reads["full"](slice(1000, 1000))) == 0
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 100)
    with pytest.raises(ValueError, match=r"model\.safetensors: cannot be read: EOFError"):
        reads["full"](slice(999, 1000))


def _files_of_pickles(folder: Path) -> None:
    import transformers

    from graphshard.integrations.transformers import from_pretrained

    model = from_pretrained(transformers.GPT2LMHeadModel, folder)
    assert model.lm_head.weight is model.transformer.wte.weight  # the file has both names
    expected = torch.load(folder / "pytorch_model.bin")
    state = graphshard.full_state_dict(model)
    assert dist.get_rank() or all(torch.equal(state[n], v) for n, v in expected.items())


def test_checkpoint_of_torch_save_is_loaded(tmp_path: Path) -> None:
    model = gpt2()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    ranks.run(2, _files_of_pickles, tmp_path)


# --- save_pretrained ---------------------------------------------------------------------------


class Wrapped(torch.nn.Module):
    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.net(**batch).loss


def _shard_by(how: str, model: Any) -> None:
    whole = Wrapped(model)
    if how == "shard":
        graphshard.shard(model)
    elif how == "accelerate":
        prepare(Accelerator(cpu=True), model, compiler="aot_eager")
    compiled: Any = whole
    if how == "first step":
        compiled = torch.compile(whole, backend=graphshard.backend(compiler="aot_eager"))
    optim = torch.optim.SGD(model.parameters(), 0.1)
    loss = compiled(causal_batch(torch.Generator().manual_seed(dist.get_rank())))
    loss.backward()
    optim.step()


BUILD: dict[str, Callable[[], Any]] = {
    "tied": lambda: gpt2(n_layer=1),
    "untied": lambda: llama(num_hidden_layers=1),
}


@pytest.mark.parametrize(
    ("how", "name"),
    [("shard", "tied"), ("shard", "untied"), ("first step", "tied"), ("accelerate", "untied")],
)
@on_ranks(2)
def test_sharded_model_is_saved_by_all_ranks(how: str, name: str, tmp_path: Path) -> None:
    as_by_torchrun()
    model = BUILD[name]()
    _shard_by(how, model)
    is_first, own = dist.get_rank() == 0, tmp_path / str(dist.get_rank())
    settings: dict[str, Any] = {"is_main_process": is_first, "save_function": torch.save}
    copied = copy.deepcopy(model)
    model.save_pretrained(own, max_shard_size="30KB", **settings)
    model.get_parameter(next(iter(dict(model.named_parameters())))).data.zero_()
    copied.save_pretrained(f"{own}-copied", **settings)  # saves the copy's values
    assert own.exists() == is_first
    with pytest.raises(ValueError, match=r"is_main_process=False on the first rank of the mesh"):
        model.save_pretrained(own, not is_first)
    state = graphshard.full_state_dict(copied)
    if is_first:
        assert len(list(own.glob("*.safetensors"))) > 1
        for place in (own, f"{own}-copied"):
            loaded = type(BUILD[name]()).from_pretrained(place).state_dict()
            assert loaded.keys() == state.keys()
            assert all(torch.equal(value, state[key]) for key, value in loaded.items())
        assert "state_dict" not in vars(model)
    # As in scripts for FSDP, only the first rank has a state dict.
    model.save_pretrained(f"{own}-given", state_dict=dict(state), **settings)
    # As in scripts for LoRA, which assign a method that selects what is saved.
    model.state_dict = own_method = functools.partial(type(model).state_dict, model)
    model.save_pretrained(f"{own}-assigned", **settings)
    assert vars(model)["state_dict"] is own_method
    if is_first:
        loaded = type(BUILD[name]()).from_pretrained(f"{own}-assigned").state_dict()
        assert loaded.keys() == state.keys()


class _Part(torch.nn.Module, PyTorchModelHubMixin):
    """A module whose ``save_pretrained`` takes no state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 5)


class _Parts(torch.nn.Sequential):
    """A container that saves its modules one by one, as sentence-transformers does."""

    def save_pretrained(self, folder: Path) -> None:
        for number, module in enumerate(self):
            module.save_pretrained(folder / str(number))


@on_ranks(2)
def test_parts_of_a_sharded_model_are_saved_in_full(tmp_path: Path) -> None:
    model = _Parts(_Part(), _Part())
    graphshard.shard(model)
    model.save_pretrained(tmp_path)
    state = graphshard.full_state_dict(model)
    for number in range(2 if dist.get_rank() == 0 else 0):
        loaded = load_file(tmp_path / str(number) / "model.safetensors")
        assert all(torch.equal(value, state[f"{number}.{key}"]) for key, value in loaded.items())
        assert len(loaded) == 2


@on_ranks(2)
def test_mesh_without_rank_0_saves(tmp_path: Path) -> None:
    group = dist.new_group([1])
    if dist.get_rank() == 0:
        return
    model = llama(num_hidden_layers=1)
    expected = copy.deepcopy(model.state_dict())
    graphshard.shard(model, DeviceMesh.from_group(group, "cpu"))
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in expected.items())
    assert "should_save_on_this_rank" not in vars(model)


# --- errors --------------------------------------------------------------------------------------


def _error(folder: Path, cls: str, arguments: dict[str, Any], elsewhere: Path | None) -> str:
    """Return this rank's error from loading; the last rank loads from ``elsewhere``, if given."""
    import transformers

    from graphshard.integrations.transformers import from_pretrained

    if elsewhere is not None and dist.get_rank() == dist.get_world_size() - 1:
        folder = elsewhere
    with pytest.raises((ValueError, RuntimeError, OSError)) as raised:
        from_pretrained(getattr(transformers, cls), folder, **arguments)
    return str(raised.value)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "strict": (
        "GPT2ForSequenceClassification",
        {"strict": True},
        "no file has 'score.weight'",
    ),
    "other shapes": (
        "GPT2LMHeadModel",
        {"n_positions": 16},
        "'transformer.wpe.weight' is (32, 32) in the checkpoint but (16, 32) in the model",
    ),
    "no model": ("GPT2Config", {}, "pass a model class of transformers"),
    "device_map": ("GPT2LMHeadModel", {"device_map": "auto"}, "device_map='auto': graphshard"),
    "ignored_params": (
        "GPT2LMHeadModel",
        {"sharding": {"ignored_params": []}},
        '{"shard": False}',
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unloadable_checkpoint_or_argument_is_an_error(name: str, tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path)
    cls, arguments, text = REFUSED[name]
    for error in ranks.run(2, _error, tmp_path, cls, arguments, None):
        assert text in error


def test_error_on_one_rank_is_raised_by_all(tmp_path: Path) -> None:
    whole, broken, other, changed = map(tmp_path.joinpath, ("whole", "broken", "other", "changed"))
    model = gpt2()
    for folder in (whole, broken):
        model.save_pretrained(folder)
    state = {name: v for name, v in model.state_dict().items() if "ln_f" not in name}
    model.save_pretrained(other, state_dict=state)
    with torch.no_grad():
        model.transformer.ln_f.bias.add_(1)
    model.save_pretrained(changed)
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    for folder, text in (
        (broken, "model.safetensors: cannot be read"),
        (other, "'transformer.ln_"),
        (changed, "'transformer.ln_f.bias in the checkpoint' differs between ranks"),
    ):
        first, last = ranks.run(2, _error, whole, "GPT2LMHeadModel", {}, folder)
        assert text in first and text in last
        assert "rank 1" in first
