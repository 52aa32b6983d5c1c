"""Unsupported models and options raise an error on every rank before anything changes."""

from __future__ import annotations

import os
import re
import select
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import graphshard
from graphshard.errors import BackendError
from tests.models import MLP
from tests.numerics.compare import NEEDS_FP8, compile_sharded, world_mesh
from tests.ranks import on_ranks

ERRORS = (ValueError, RuntimeError)
X = torch.ones(5, 7)

Act = Callable[[nn.Module], object]
"""Function that must raise for the given model."""


def first_step(model: nn.Module) -> object:
    return compile_sharded(model)(X)


def first_step_in_place(model: nn.Module) -> object:
    model.compile(backend=graphshard.backend(world_mesh(), compiler="aot_eager"))
    return model(X)


def shard(model: nn.Module) -> object:
    return graphshard.shard(model, world_mesh())


def assert_refused(model: nn.Module, act: Act, match: str) -> None:
    before = [(name, p, None if p.is_meta else p.detach().clone()) for name, p in _named(model)]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    classes = [type(module) for module in model.modules()]
    with pytest.raises(ERRORS, match=match):
        act(model)
    assert [type(module) for module in model.modules()] == classes
    assert len(_named(model)) == len(before)
    for (name, param), (old_name, old, value) in zip(_named(model), before):
        assert name == old_name and param is old, name
        assert value is None or torch.equal(param.detach(), value), name
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    if dist.is_initialized():
        dist.barrier()  # every rank has left all other collectives


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters(remove_duplicate=False))


# No process group, and wrong meshes.


@pytest.mark.parametrize(
    "act",
    [
        lambda model: torch.compile(model, backend=graphshard.backend(compiler="aot_eager"))(X),
        lambda model: torch.compile(model, backend="graphshard")(X),
        lambda model: torch.compile(lambda x: model(x), backend=graphshard.backend())(X),
        graphshard.shard,
    ],
    ids=["backend", "string", "function", "shard"],
)
def test_missing_process_group_is_an_error(act: Act) -> None:
    assert not dist.is_initialized()
    torch._dynamo.reset()
    assert_refused(MLP(), act, "^there is no process group to shard over")


@pytest.mark.parametrize(
    ("as_function", "policy"),
    [(False, None), (True, None), (False, MixedPrecisionPolicy(torch.bfloat16))],
    ids=["module", "function", "module in bf16"],
)
def test_lines_advised_by_error_make_one_process_train(
    as_function: bool, policy: MixedPrecisionPolicy | None
) -> None:
    model = MLP()
    target = (lambda x: model(x)) if as_function else model
    torch._dynamo.reset()
    backend = graphshard.backend(mp_policy=policy, compiler="aot_eager")
    compiled = torch.compile(target, backend=backend)
    with pytest.raises(BackendError) as raised:
        compiled(X)
    lines = str(raised.value).splitlines()[1:3]
    try:
        exec("\n".join(lines), {})
        compiled(X).backward()
    finally:
        dist.destroy_process_group()


def _backend_on(model: nn.Module, mesh: DeviceMesh) -> object:
    return torch.compile(model, backend=graphshard.backend(mesh, compiler="aot_eager"))(X)


def _function_on(model: nn.Module, mesh: DeviceMesh) -> object:
    backend = graphshard.backend(mesh, compiler="aot_eager")
    return torch.compile(lambda x: model(x), backend=backend)(X)


ON_MESH = [_backend_on, _function_on, graphshard.shard]


@pytest.mark.parametrize("make", ON_MESH)
@on_ranks(2)
def test_mesh_of_three_axes_is_refused(make: Any) -> None:
    mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("stage", "replicate", "shard"))
    assert_refused(MLP(), lambda model: make(model, mesh), r"mesh has 3 axes.*replicate.*shard")


@pytest.mark.parametrize("make", ON_MESH)
@on_ranks(2)
def test_mesh_with_an_axis_of_tensor_parallelism_is_refused(make: Any) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("tp", "dp"))
    assert_refused(MLP(), lambda model: make(model, mesh), r"'tp' would be.*as in mesh\['dp'\]")


@pytest.mark.parametrize("make", ON_MESH)
@on_ranks(2)
def test_mesh_of_another_device_is_refused(make: Any) -> None:
    assert dist.group.WORLD is not None
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cuda")
    assert_refused(MLP(), lambda model: make(model, mesh), r"'up\.weight' is on cpu.*mesh is on")


# Models that are wrapped or sharded already, or have uninitialized parameters.


class _Dressed(nn.Module):
    def __init__(self, prepare: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 7)
        self.part = prepare(nn.Linear(7, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.inner(x)).sum()


def _fsdp2(module: nn.Module) -> nn.Module:
    return fully_shard(module, mesh=world_mesh())


def _dtensor(module: nn.Linear) -> nn.Module:
    weight = distribute_tensor(module.weight.detach(), world_mesh(), [Shard(0)])
    module.weight = nn.Parameter(weight)
    return module


def _meta(module: nn.Module) -> nn.Module:
    return module.to("meta")


def _lazy(module: nn.Module) -> nn.Module:
    return nn.LazyLinear(3)


PREPARED = [
    (_fsdp2, "'part'.*FSDPModule"),
    (DistributedDataParallel, "'part'.*DistributedDataParallel"),
    (_dtensor, r"'part\.weight'.*DTensor"),
    (_meta, r"'part\.weight' is on the meta device"),
    (_lazy, r"'part\.(weight|bias)' is lazy"),
]


@pytest.mark.parametrize(("prepare", "match"), PREPARED)
@pytest.mark.parametrize("act", [first_step, shard])
@on_ranks(2)
def test_part_that_cannot_be_sharded_is_refused(
    prepare: Callable[[Any], nn.Module], act: Act, match: str
) -> None:
    model = _Dressed(prepare)
    if prepare is _lazy:  # its parameters have no values to compare
        with pytest.raises(ERRORS, match=match):
            act(model)
        assert type(model.inner.weight) is nn.Parameter
        return
    assert_refused(model, act, match)


def first_step_on_meta(model: nn.Module) -> object:
    """Call the model with meta inputs, since Dynamo rejects a graph on two devices."""
    return compile_sharded(lambda x: model(x))(X.to("meta"))


@pytest.mark.parametrize("act", [first_step, first_step_on_meta, first_step_in_place])
@on_ranks(2)
def test_model_on_meta_is_refused_at_first_step(act: Act) -> None:
    with torch.device("meta"):
        model = MLP()
    assert_refused(model, act, r"'up\.weight' is on the meta device.*to_empty")


# Differences between ranks: each function changes one rank's model.


def _other_shape(model: Any) -> None:
    model.up.bias = nn.Parameter(torch.zeros(1))


def _other_dtype(model: Any) -> None:
    model.up.bias = nn.Parameter(torch.zeros(13).double())


def _other_name(model: Any) -> None:
    model.up.register_parameter("shift", model.up.bias)
    model.up.bias = None


def _one_more(model: Any) -> None:
    model.extra = nn.Linear(2, 2)


def _frozen(model: Any) -> None:
    model.up.bias.requires_grad_(False)


def _other_buffer(model: Any) -> None:
    model.up.register_buffer("count", torch.zeros(3))


def _called_options(model: Any) -> None:
    model.register_parameter("options", nn.Parameter(torch.zeros(3)))


def _with_gradient(model: Any) -> None:
    model.up.bias.grad = torch.zeros(13)


DIFFERENCES = [
    (_other_shape, r"'up\.bias' differs between ranks.*\(13,\).*\(1,\).*Build the same"),
    (_other_dtype, r"'up\.bias' differs between ranks.*float32.*float64"),
    (_other_name, r"'up\.(bias|shift)' differs between ranks.*missing"),
    (_one_more, r"'extra\.weight' differs between ranks.*missing"),
    (_frozen, r"'up\.bias' differs between ranks.*requires_grad.*Freeze the same"),
    (_other_buffer, r"'up\.count' differs between ranks.*missing"),
    (_called_options, r"'options' differs between ranks.*missing"),
    (_with_gradient, r"'up\.bias' differs between ranks.*gradient.*zero_grad"),
]


@pytest.mark.parametrize(
    ("change", "changed_rank", "match"),
    [*((change, 1, match) for change, match in DIFFERENCES), (_one_more, 0, "")],
)
@on_ranks(2)
def test_model_that_differs_between_ranks_is_refused(
    change: Callable[[Any], None], changed_rank: int, match: str
) -> None:
    model = MLP()
    if dist.get_rank() == changed_rank:
        change(model)
    assert_refused(model, shard, match)
    assert_refused(model, lambda m: compile_sharded(lambda x: m.mid(m.up(x)))(X), match)


@NEEDS_FP8
@on_ranks(2)
def test_fp8_parameter_with_gradient_that_one_rank_freezes_is_refused() -> None:
    model = MLP()
    model.up.weight.grad = torch.zeros(13, 7)
    model.up.weight.requires_grad_(dist.get_rank() == 0)
    fp8 = graphshard.Float8Policy(filter_fn=lambda fqn, shape: True)
    match = r"'up\.weight' differs between ranks.*requires_grad.*Freeze the same"
    assert_refused(model, lambda m: graphshard.shard(m, world_mesh(), fp8=fp8), match)


@pytest.mark.parametrize(
    "options",
    [
        [{"reshard_after_forward": True}, {"reshard_after_forward": False}],
        [{"sync_module_states": False}, {}],
        [{"compiler": "inductor"}, {"compiler": "aot_eager"}],
    ],
)
@on_ranks(2)
def test_options_that_differ_between_ranks_are_refused(options: list[dict[str, Any]]) -> None:
    name, mine = next(iter(options[0])), options[dist.get_rank()]
    match = f"'arguments of graphshard' differs between ranks.*{name}.*Pass the same"
    assert_refused(MLP(), lambda m: graphshard.shard(m, world_mesh(), **mine), match)
    mine = {"compiler": "aot_eager", **mine}
    assert_refused(MLP(), lambda m: compile_sharded(m, **mine)(X), match)


@on_ranks(2)
def test_ignored_params_that_differ_between_ranks_are_refused() -> None:
    model = MLP()
    ignored = [model.up.bias] if dist.get_rank() == 0 else []
    act = lambda m: graphshard.shard(m, world_mesh(), ignored_params=ignored)  # noqa: E731
    assert_refused(model, act, r"'up\.bias' differs between ranks.*missing")


@on_ranks(2)
def test_fault_on_one_rank_is_an_error_on_all() -> None:
    model = _Dressed(lambda module: module.to("meta") if dist.get_rank() == 1 else module)
    assert_refused(model, shard, r"rank 1 of the mesh: parameter 'part\.weight' is on the meta")


# Invalid options, refused even without a process group.

BAD_OPTIONS: dict[str, list[Any]] = {
    "mesh": ["cpu", 2],
    "reshard_after_forward": [0, -2, "yes", None],
    "mp_policy": [
        torch.bfloat16,
        MixedPrecisionPolicy(param_dtype=torch.float8_e4m3fn),
        MixedPrecisionPolicy(reduce_dtype=torch.int32),
        MixedPrecisionPolicy(output_dtype="bfloat16"),  # type: ignore[arg-type]
        MixedPrecisionPolicy(cast_forward_inputs=None),  # type: ignore[arg-type]
    ],
    "offload_policy": ["cpu", True],
    "ignored_params": [["up.weight"], [torch.zeros(3)], nn.Parameter(torch.zeros(3)), 3],
    "overrides": [
        {"*.norm": {"shard": 0}},
        {"up.weight": {"mp_policy": "bf16"}},
        {"up.weight": {"reshard_after_forward": "some"}},
        {"up.weight": False},
        ["up.weight"],
    ],
    "fp8": [True],
    "schedule": ["fast"],
    "compiler": ["nvcc", None],
    "dump": [3, ""],
    "sync_module_states": ["no", None],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD_OPTIONS.items() for value in values]
)
def test_invalid_option_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ERRORS, match=name):
        graphshard.backend(**{name: value})
    assert_refused(MLP(), lambda model: graphshard.shard(model, **{name: value}), name)


def test_shard_refuses_an_optimizer() -> None:
    with pytest.raises(ValueError, match=r"model is a SGD: pass the nn\.Module"):
        graphshard.shard(torch.optim.SGD(MLP().parameters()))  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [graphshard.backend, lambda **o: graphshard.shard(MLP(), **o)])
def test_unknown_option_is_refused(make: Callable[..., object]) -> None:
    with pytest.raises(TypeError, match="bucket_size"):
        make(bucket_size=3)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"bucket_size": 3}, r"'bucket_size'.*choose from.*reshard_after_forward"),
        ({"compiler": "nvcc"}, r"compiler='nvcc'.*inductor"),
        ({"reshard_after_forward": "yes"}, "reshard_after_forward='yes'"),
    ],
)
@on_ranks(2)
def test_invalid_options_of_backend_by_name_are_refused(
    options: dict[str, Any], match: str
) -> None:
    act = lambda m: torch.compile(m, backend="graphshard", options=options)(X)  # noqa: E731
    assert_refused(MLP(), act, match)


# Compiled functions whose model graphshard cannot find or modify.


@on_ranks(2)
def test_parameter_without_a_module_is_refused() -> None:
    param = nn.Parameter(torch.ones(7))
    loss = compile_sharded(lambda x: (x * param).sum())
    with pytest.raises(ERRORS, match=re.escape("belongs to no module")):
        loss(X)
    assert type(param) is nn.Parameter


class _Final(type):
    def mro(cls) -> list[type]:
        if any(isinstance(base, _Final) for base in cls.__bases__):
            raise TypeError("it is final")
        return super().mro()


class _Sealed(nn.Linear, metaclass=_Final):
    pass


@pytest.mark.parametrize("act", [first_step, shard])
@on_ranks(2)
def test_module_class_without_subclasses_is_refused(act: Act) -> None:
    assert_refused(nn.Sequential(nn.Linear(7, 7), _Sealed(7, 3)), act, "class _Sealed.*it is final")


class _ScaledByGetattr(nn.Module):
    gain = 0.5

    def __init__(self) -> None:
        super().__init__()
        self._parameters["weight"] = nn.Parameter(torch.randn(7, 3))

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        return value * self.gain if name == "weight" else value

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class _ScaledByProperty(_ScaledByGetattr):
    weight = property(lambda self: self._parameters["weight"] * self.gain)


class _Unreadable(_ScaledByProperty):
    gain = property(lambda self: 1 / 0)  # type: ignore[assignment]


@pytest.mark.parametrize("act", [first_step, shard])
@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (_ScaledByGetattr, "'1.weight' .* _ScaledByGetattr returns something else"),
        (_ScaledByProperty, "'1.weight' .* _ScaledByProperty returns .*register_parametrization"),
        (_Unreadable, "'1.weight' .* _Unreadable raises ZeroDivisionError"),
    ],
)
@on_ranks(2)
def test_class_that_changes_its_parameter_is_refused(
    kind: type[nn.Module], match: str, act: Act
) -> None:
    assert_refused(nn.Sequential(nn.Linear(7, 7), kind()), act, match)


class _Forwarding(nn.Module):
    """Forwards unknown attributes to the module it wraps, as `CheckpointWrapper` does."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.wrapped = wrapped
        self.shift = nn.Parameter(torch.zeros(3))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("wrapped"), name)

    def forward(self, x: Tensor) -> Tensor:
        return self.wrapped(x) + self.weight.sum() + self.shift


class _ScaledFromRaw(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.raw_weight = linear.weight

    weight = property(lambda self: self.raw_weight * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


@pytest.mark.parametrize("kind", [_Forwarding, _ScaledFromRaw])
@on_ranks(2)
def test_class_that_computes_attributes_is_not_refused(kind: Callable[..., nn.Module]) -> None:
    model = kind(nn.Linear(7, 3))
    expected = model(X)
    assert torch.allclose(compile_sharded(model)(X), expected)


def _script(module: nn.Module) -> nn.Module:
    script: nn.Module = torch.jit.script(module)
    return script


def _trace(module: nn.Module) -> nn.Module:
    traced: nn.Module = torch.jit.trace(module, X)
    return traced


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("act", [first_step, shard])
@pytest.mark.parametrize("script", [_script, _trace])
@on_ranks(2)
def test_torchscript_module_is_refused(script: Callable[..., Any], act: Act) -> None:
    assert_refused(_Dressed(script), act, "'part.weight' is held by a TorchScript module")


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("script", [_script, _trace])
@on_ranks(2)
def test_frozen_torchscript_module_may_be_ignored(script: Callable[..., Any]) -> None:
    model = _Dressed(script)
    ignored = list(model.part.parameters())
    for param in ignored:
        param.requires_grad = False
    expected = model(X)
    backend = graphshard.backend(world_mesh(), compiler="aot_eager", ignored_params=ignored)
    loss = torch.compile(model, backend=backend)(X)
    loss.backward()
    assert torch.allclose(loss, expected) and model.inner.weight.grad is not None


def _error_in_fork(act: Callable[[], object], timeout_s: float = 20) -> str:
    """Return the text of the error that ``act()`` raises in a forked process."""
    # Not by multiprocessing: ranks are daemons, which may not have children.
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            act()
        except BaseException as error:
            os.write(writer, str(error).encode()[:1000])
        finally:
            os._exit(0)
    os.close(writer)
    ends, _, _ = select.select([reader], [], [], timeout_s)
    if not ends:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(reader) as pipe:
        return pipe.read()


@on_ranks(2)
def test_forked_process_is_refused() -> None:
    model = MLP()
    compiled = compile_sharded(model)
    compiled(X).backward()
    acts = (
        lambda: compiled(X),
        lambda: model(X),
        lambda: graphshard.full_state_dict(model),
    )
    for act in acts:
        assert "worker of a DataLoader, cannot use a sharded model" in _error_in_fork(act)
    compiled(X).backward()
