from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

import graphshard
from graphshard.errors import BackendError
from tests import ranks, recording
from tests.models import GPT, MLP, ConvNet, Trainable
from tests.numerics.compare import draw, full_values, sgd, whole, world_mesh
from tests.numerics.test_loading import Kinds
from tests.ranks import on_ranks

State = dict[str, Any]


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2)


def _step(called: Any, optim: torch.optim.Optimizer, kind: Trainable, step: int) -> float:
    loss = called(draw(kind.batch, step, 1)[0])
    loss.backward()
    optim.step()
    optim.zero_grad()
    return float(loss.detach())


def _trained(
    kind: Trainable, shape: tuple[int, ...] = (2,), **options: Any
) -> tuple[Any, Any, torch.optim.Optimizer]:
    model = kind()
    backend = graphshard.backend(init_device_mesh("cpu", shape), compiler="aot_eager", **options)
    compiled = torch.compile(model, backend=backend)
    optim = _adamw(model)
    for step in range(2):
        _step(compiled, optim, kind, step)
    return model, compiled, optim


def _assert_equal(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, Tensor):
        assert type(ours) is type(theirs) is Tensor and ours.device.type == "cpu"
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key, value in theirs.items():
            _assert_equal(ours[key], value)
    elif isinstance(theirs, list):
        for pair in zip(ours, theirs, strict=True):
            _assert_equal(*pair)
    else:
        assert ours == theirs


# Gathering to the first rank.


def _step_on_one_batch(models: Any, optims: Any) -> None:
    for model, optim in zip(models, optims):
        model.zero_grad()
        model(torch.arange(64.0)[None] / 64).square().mean().backward()
        with torch.compiler.set_stance("force_eager"):  # torchao compiles its step with Inductor
            optim.step()


@on_ranks(2)
def test_8_bit_optimizer_states_are_gathered_and_loaded() -> None:
    """Compare 8-bit states with unsharded ones; shards end at block boundaries of torchao."""
    from torchao.optim import AdamW8bit

    models = nn.Linear(64, 128), graphshard.shard(nn.Linear(64, 128), world_mesh())
    models[0].load_state_dict(full_values(models[1]))
    optims = [AdamW8bit(model.parameters(), 1e-2) for model in models]
    _step_on_one_batch(models, optims)
    (_, expected), (state, optim_state) = map(graphshard.full_state_dict, models, optims)
    if dist.get_rank() == 0:
        assert optim_state["state"]["weight"]["exp_avg"].count_nonzero() > 4096
        _assert_equal(optim_state["state"], expected["state"])
    _step_on_one_batch(models[1:], optims[1:])  # undone by the load
    graphshard.load_full_state_dict(models[1], state, optims[1], optim_state)
    again = graphshard.full_state_dict(models[1], optims[1])[1]
    if dist.get_rank() == 0:
        loaded, saved = (s["state"]["weight"]["exp_avg"] for s in (again, optim_state))
        # Not bitwise: torchao's codebook ends at -0.993 instead of -1, which clips a block's
        # largest element if it is negative.
        assert (loaded - saved).abs().max() <= 0.01 * saved.abs().max()
    _step_on_one_batch(models, optims)
    assert (whole(models[1].weight) - models[0].weight).abs().max() < 1e-4


@on_ranks(2)
def test_states_of_checkpoint_wrapper_have_plain_names() -> None:
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(3, 4)))
    graphshard.shard(model, world_mesh())
    optim = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(2, 3)).sum().backward()
    optim.step()
    state, optim_state = graphshard.full_state_dict(model, optim)
    if dist.get_rank() == 0:
        assert set(state) == set(optim_state["state"]) == {"0.weight", "0.bias"}
    graphshard.load_full_state_dict(model, state, optim, optim_state)


def _save(kind: Trainable, shape: tuple[int, ...], options: State, folder: Path) -> None:
    model, compiled, optim = _trained(kind, shape, **options)
    expected = full_values(model)
    for source in (model, compiled):
        state, optim_state = graphshard.full_state_dict(source, optim)
        assert list(graphshard.full_state_dict(source)) == list(state)
        if dist.get_rank() != 0:
            assert state == {} and optim_state == {}
            continue
        _assert_equal(dict(state), expected)
    torch_options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    theirs = get_optimizer_state_dict(model, optim, options=torch_options)
    if dist.get_rank() == 0:
        _assert_equal(optim_state["state"], theirs["state"])
        torch.save((state, optim_state, _next_losses(compiled, optim, kind)), folder / "all.pt")
    else:
        _next_losses(compiled, optim, kind)


def _next_losses(called: Any, optim: torch.optim.Optimizer, kind: Trainable) -> list[float]:
    return [_step(called, optim, kind, step) for step in range(5, 8)]


SETUPS: dict[str, tuple[Trainable, tuple[int, ...], State]] = {
    "tied": (GPT, (2,), {}),
    "buffers": (ConvNet, (2,), {}),
    "HSDP": (MLP, (2, 2), {}),
    "offload": (MLP, (2,), {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "some are replicated": (MLP, (2,), {"overrides": {"mid.*": {"shard": False}}}),
}


@pytest.fixture(scope="module", params=SETUPS)
def setup(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def saved(setup: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a trained model's full states, and the losses of its next steps."""
    kind, shape, options = SETUPS[setup]
    folder = tmp_path_factory.mktemp("saved")
    ranks.run(torch.Size(shape).numel(), _save, kind, shape, options, folder)
    return folder


def test_plain_torch_loads_full_state_and_continues(setup: str, saved: Path) -> None:
    kind, _, _ = SETUPS[setup]
    state, optim_state, losses = torch.load(saved / "all.pt")
    plain = kind()
    plain.load_state_dict(state, strict=True)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, state[name]), name
    optim = _adamw(plain)
    set_optimizer_state_dict(plain, optim, optim_state)
    assert _next_losses(plain, optim, kind) == pytest.approx(losses, rel=1e-4)


@on_ranks(2)
def test_only_named_entries_are_gathered() -> None:
    model = torch.compile(GPT(), backend="eager")
    graphshard.shard(model, world_mesh())
    every = graphshard.full_state_dict(model)
    wanted = ["head.weight", "tokens.weight"]
    state = graphshard.full_state_dict(model, names=wanted[:: 1 - 2 * dist.get_rank()])
    if dist.get_rank() == 0:
        assert sorted(state) == wanted and state._metadata == every._metadata
        assert all(torch.equal(value, every[name]) for name, value in state.items())
    optim = _adamw(model)
    _, optim_state = graphshard.full_state_dict(model, optim, names=["head.weight"])
    graphshard.load_full_state_dict(model, every, optim, optim_state)  # ignores `names`
    with pytest.raises(ValueError, match="names has 'wrong', which is not in the state dict"):
        graphshard.full_state_dict(model, names=wanted if dist.get_rank() == 0 else ["wrong"])
    with pytest.raises(ValueError, match=r"'head.weight' differs.*same names on all ranks"):
        graphshard.full_state_dict(model, names=wanted[dist.get_rank() :])


@on_ranks(2)
def test_tied_weights_and_module_versions_are_kept() -> None:
    model = graphshard.shard(GPT(), world_mesh())
    state = graphshard.full_state_dict(model)
    if dist.get_rank() == 0:
        assert state["head.weight"] is state["tokens.weight"]
        assert state._metadata == GPT().state_dict()._metadata


class Regional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head, self.epoch = nn.Linear(7, 7), nn.Linear(7, 3), 4
        self.seen = torch.arange(3)

    def get_extra_state(self) -> Any:
        return {"epoch": self.epoch, "seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.epoch, self.seen = state["epoch"], state["seen"]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)).square().mean()

    batch = staticmethod(MLP.batch)


@on_ranks(2)
def test_names_omit_prefix_of_compiled_parts() -> None:
    model = graphshard.shard(Regional(), world_mesh())
    names = list(model.state_dict())
    model.layer = torch.compile(model.layer, backend="eager")
    optim = _adamw(model)
    _step(model, optim, Regional, 0)
    state, optim_state = graphshard.full_state_dict(model, optim)
    other = graphshard.shard(Regional(), world_mesh())
    other.head = torch.compile(other.head, backend="eager")
    other.epoch, other.seen = 0, torch.zeros(3)
    graphshard.load_full_state_dict(other, state, _adamw(other), optim_state)
    assert other.epoch == 4 and other.seen.tolist() == [0, 1, 2]
    again = graphshard.full_state_dict(other)
    if dist.get_rank() == 0:
        assert list(state) == names and not any("_orig_mod" in n for n in optim_state["state"])
        _assert_equal(dict(again), dict(state))
        Regional().load_state_dict(state)


@on_ranks(2)
def test_full_state_of_unsharded_model_is_a_copy() -> None:
    model = ConvNet()
    model.norm1.running_mean.fill_(dist.get_rank())
    state = graphshard.full_state_dict(model)
    assert (state == {}) == (dist.get_rank() > 0)
    if state:
        _assert_equal(dict(state), dict(model.state_dict()))
        assert state["head.weight"].data_ptr() != model.head.weight.data_ptr()


# Loading on the first rank.


def _load(kind: Trainable, shape: tuple[int, ...], options: State, folder: Path) -> None:
    torch.manual_seed(77)
    model = graphshard.shard(kind(), init_device_mesh("cpu", shape), **options)
    optim = _adamw(model)
    params = list(model.parameters())
    given: Any = (None, None)
    if dist.get_rank() == 0:
        *given, _ = torch.load(folder / "all.pt")
        before = copy.deepcopy(given)
    missing = graphshard.load_full_state_dict(model, given[0], optim, given[1])
    assert missing == ([], [])
    assert all(a is b for a, b in zip(model.parameters(), params))
    again = graphshard.full_state_dict(model, optim)
    if dist.get_rank() == 0:
        _assert_equal([dict(again[0]), again[1]], [dict(before[0]), before[1]])
        _assert_equal([dict(given[0]), given[1]], [dict(before[0]), before[1]])
    for value in (v for state in optim.state.values() for v in state.values()):
        assert isinstance(value, DTensor) == (value.dim() > 0)
    compiled = torch.compile(model, backend=graphshard.backend(compiler="aot_eager", **options))
    losses = _next_losses(compiled, optim, kind)
    assert losses == pytest.approx(torch.load(folder / "all.pt")[2], rel=1e-4)


def test_state_on_first_rank_is_loaded_on_all_ranks(setup: str, saved: Path) -> None:
    kind, shape, options = SETUPS[setup]
    ranks.run(torch.Size(shape).numel(), _load, kind, shape, options, saved)
    if setup == "HSDP":
        ranks.run(2, _load, kind, (2,), options, saved)


class _MoreKinds(Kinds):
    def __init__(self) -> None:
        super().__init__()
        table = torch.randn(5, 3).to(torch.float8_e4m3fn)  # which gloo cannot send
        self.table = nn.Parameter(table, requires_grad=False)


@on_ranks(2)
def test_parameters_of_every_kind_are_loaded_and_gathered() -> None:
    model, expected = graphshard.shard(_MoreKinds(), world_mesh()), None
    if dist.get_rank() == 0:
        torch.manual_seed(77)
        expected = dict(_MoreKinds().state_dict())
    graphshard.load_full_state_dict(model, expected)
    state = graphshard.full_state_dict(model)
    if expected:
        _assert_equal(dict(state), expected)


@on_ranks(3)
def test_full_state_is_on_first_rank_of_mesh() -> None:
    if dist.get_rank() > 0:
        model = graphshard.shard(MLP(), DeviceMesh("cpu", [1, 2]))
        state = graphshard.full_state_dict(model)
        assert bool(state) == (dist.get_rank() == 1)
        graphshard.load_full_state_dict(model, state)
    dist.barrier()


@on_ranks(2, backend=recording.BACKEND)
def test_rows_are_sent_only_to_their_rank() -> None:
    model = graphshard.shard(MLP(), world_mesh())
    state = graphshard.full_state_dict(model)
    recording.clear()
    graphshard.load_full_state_dict(model, state)
    assert recording.events("scatter")
    assert all(event.dtype != torch.float32 for event in recording.events("broadcast"))


@on_ranks(2)
def test_missing_optimizer_state_stays_missing() -> None:
    model = graphshard.shard(Kinds(), world_mesh())
    optim = torch.optim.AdamW([{"params": [model.row], "lr": 0.5}, {"params": [model.whole]}])
    model.row.grad = torch.ones_like(model.row)
    fresh = graphshard.full_state_dict(model, optim)
    optim.step()
    stepped = graphshard.full_state_dict(model, optim)
    for state, expected in ((fresh, []), (stepped, ["row"])):
        other = torch.optim.AdamW([{"params": [model.row]}, {"params": [model.whole]}])
        graphshard.load_full_state_dict(model, state[0], other, state[1])
        again = graphshard.full_state_dict(model, other)
        assert other.param_groups[0]["lr"] == 0.5
        if dist.get_rank() == 0:
            assert list(state[1]["state"]) == expected
            _assert_equal(again[1], state[1])
    plain = sgd(model)
    state = graphshard.full_state_dict(model, plain)
    graphshard.load_full_state_dict(model, state[0], plain, state[1])


@on_ranks(2)
def test_full_state_gathered_by_torch_is_loaded() -> None:
    model, _, optim = _trained(GPT)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    theirs = get_state_dict(model, optim, options=options)
    torch.manual_seed(77)
    other = graphshard.shard(GPT(), world_mesh())
    other_optim = _adamw(other)
    graphshard.load_full_state_dict(other, theirs[0], other_optim, theirs[1])
    ours = graphshard.full_state_dict(other, other_optim)
    if dist.get_rank() == 0:
        _assert_equal(dict(ours[0]), dict(theirs[0]))
        _assert_equal(ours[1]["state"], theirs[1]["state"])


@on_ranks(2)
def test_load_hook_may_compute_values() -> None:
    class Transposed(nn.Linear):
        def _load_from_state_dict(self, state_dict: State, prefix: str, *args: Any) -> None:
            state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}old").t() * 2
            super()._load_from_state_dict(state_dict, prefix, *args)

    model = graphshard.shard(Transposed(3, 5, bias=False), world_mesh())
    old = torch.arange(15.0).view(3, 5)
    graphshard.load_full_state_dict(model, {"old": old} if dist.get_rank() == 0 else None)
    assert torch.equal(whole(model.weight.detach()), old.t() * 2)


@on_ranks(2)
def test_missing_optimizer_state_is_empty() -> None:
    # Checkpoints of torch.distributed.checkpoint do not keep empty containers.
    model = graphshard.shard(MLP(), world_mesh())
    optim = sgd(model)
    state, optim_state = graphshard.full_state_dict(model, optim)
    if dist.get_rank() == 0:
        assert optim_state.pop("state") == {}
        optim_state["param_groups"][0]["lr"] = 0.75
    graphshard.load_full_state_dict(model, state, optim, optim_state)
    assert optim.param_groups[0]["lr"] == 0.75 and not optim.state


# Errors, raised on every rank.


@on_ranks(2)
def test_wrong_state_on_first_rank_raises_on_all() -> None:
    model = graphshard.shard(MLP(), world_mesh())
    optim = _adamw(model)
    state, optim_state = graphshard.full_state_dict(model, optim)
    numbered = {"state": {}, "param_groups": [{"params": [0, 1]}]}
    fewer = {"state": {}, "param_groups": [{"params": ["up.weight"]}]}
    halves = [{"params": ["up.weight"]}, {"params": list(state)[1:]}]
    of_model: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "state_dict is a NoneType", None),
        (ValueError, "'up.weight' is a DTensor", model.state_dict()),
        (RuntimeError, "Missing key.*up.bias", {"up.weight": torch.ones(13, 7)}),
        (RuntimeError, "Unexpected key.*more", {**state, "more": torch.ones(1)}),
        (RuntimeError, "size mismatch for up.bias", {**state, "up.bias": torch.ones(2)}),
    ]
    of_optim: list[tuple[str, Any]] = [
        ("not an optimizer's state dict", None),
        ("not an optimizer's state dict", {}),
        ("numbers instead of parameter names", numbered),
        ("'down.bias' is only in optim", fewer),
        ("the param group of 'up.weight' is split", {"param_groups": halves}),
    ]
    is_first = dist.get_rank() == 0
    for kind, said, given in of_model:
        with pytest.raises(kind, match=f"(?s){said}"):
            graphshard.load_full_state_dict(model, given if is_first else None)
    for said, given in of_optim:
        with pytest.raises(ValueError, match=said):
            graphshard.load_full_state_dict(model, state, optim, given if is_first else None)
    # Errors that the first rank did not expect, which must not leave the others waiting.
    unsendable, no_params = {**state, "up.extra": lambda: 0}, {"state": {}, "param_groups": [{}]}
    kind = Exception if is_first else BackendError
    with pytest.raises(kind, match="pickle"):
        graphshard.load_full_state_dict(model, unsendable if is_first else None)
    with pytest.raises(kind, match=r"KeyError: 'params'|^'params'$"):
        graphshard.load_full_state_dict(model, state, optim, no_params if is_first else None)
    again = graphshard.full_state_dict(model, optim)
    _assert_equal([dict(again[0]), again[1]], [dict(state), optim_state])


@on_ranks(2)
def test_wrong_arguments_raise() -> None:
    model = MLP()
    with pytest.raises(ValueError, match="MLP is not sharded: call"):
        graphshard.load_full_state_dict(model, model.state_dict())
    graphshard.shard(model, world_mesh())
    with pytest.raises(ValueError, match="that model does not have"):
        graphshard.full_state_dict(model, sgd(MLP()))
    for call in (graphshard.full_state_dict, graphshard.load_full_state_dict):
        with pytest.raises(ValueError, match="model is a str"):
            call("model", {})
    with pytest.raises(ValueError, match="optim is a dict"):
        graphshard.full_state_dict(model, {})
    with torch.device("meta"):
        empty = graphshard.shard(MLP(), world_mesh())
    with pytest.raises(ValueError, match=r"'up.weight' is on the meta device"):
        graphshard.full_state_dict(empty)
