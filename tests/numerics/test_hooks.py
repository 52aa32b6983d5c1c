"""Hooks on parameters, which receive sharded gradients, and hooks on modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import graphshard
from tests.models import MLP
from tests.numerics.compare import Twins, draw, sgd, world_mesh
from tests.ranks import on_ranks

Batches = list[Tensor]


def _batches(step: int) -> Batches:
    return draw(MLP.batch, step)


def _register_both(twins: Twins, register: Callable[[nn.Module], Any]) -> list[Any]:
    return [register(twins.model), register(twins.reference)]


@pytest.mark.parametrize("early", [True, False])
@on_ranks(2)
def test_gradient_hook_replaces_gradient(early: bool) -> None:
    twins = Twins(MLP())
    if not early:
        twins.backward(_batches(0))
        twins.zero_grad()
    _register_both(twins, lambda m: m.up.weight.register_hook(lambda grad: grad * 3))
    _register_both(twins, lambda m: m.up.weight.register_hook(lambda grad: grad + 1))
    _register_both(twins, lambda m: m.mid.weight.register_hook(lambda grad: None))
    for step in range(2):
        twins.backward(_batches(step))
        twins.check()


@pytest.mark.parametrize("early", [True, False])
@on_ranks(2)
def test_hooks_see_sharded_gradients(early: bool) -> None:
    twins, seen = Twins(MLP()), []

    def see_grad(grad: Tensor) -> None:
        seen.append(("grad", type(grad), tuple(grad.shape)))

    def see_param(param: Tensor) -> None:
        seen.append(("param", type(param.grad), tuple(param.shape)))
        assert param is twins.model.up.bias

    if not early:
        twins.backward(_batches(0))
    twins.model.up.bias.register_hook(see_grad)
    twins.model.up.bias.register_post_accumulate_grad_hook(see_param)
    twins.backward(_batches(1))
    twins.check()
    assert seen == [("grad", DTensor, (13,)), ("param", DTensor, (13,))]


@pytest.mark.parametrize("early", [True, False])
@on_ranks(2)
def test_removed_hooks_do_not_fire(early: bool) -> None:
    twins, seen = Twins(MLP()), []
    if not early:
        twins.backward(_batches(0))
    weight = twins.model.up.weight
    handles = [
        weight.register_hook(lambda grad: seen.append("grad")),
        weight.register_post_accumulate_grad_hook(lambda param: seen.append("param")),
    ]
    twins.backward(_batches(1))
    assert seen == ["grad", "param"]
    handles[0].remove()
    twins.backward(_batches(2))
    assert seen == ["grad", "param", "param"]
    handles[1].remove()
    twins.backward(_batches(3))
    assert seen == ["grad", "param", "param"]
    twins.check()


@on_ranks(2)
def test_hook_registered_after_early_removal_fires() -> None:
    """Check that hooks work if a parameter's hook table was empty when the model was sharded."""
    twins, seen = Twins(MLP()), []
    twins.model.up.weight.register_hook(lambda grad: seen.append("early")).remove()
    twins.backward(_batches(0))
    twins.model.up.weight.register_hook(lambda grad: seen.append("late"))
    twins.backward(_batches(1))
    assert seen == ["late"]


def _step_by_hooks(model: nn.Module) -> None:
    for param in model.parameters():
        optimizer = torch.optim.SGD([param], 0.05)

        def step(param: Tensor, optimizer: torch.optim.SGD = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        param.register_post_accumulate_grad_hook(step)


def _step_by_torch(model: nn.Module) -> None:
    # Importing it compiles functions, with warnings.
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.05})


@pytest.mark.parametrize("step_in_backward", [_step_by_hooks, _step_by_torch])
@pytest.mark.parametrize("early", [True, False])
@on_ranks(2)
def test_optimizer_may_step_in_backward(
    early: bool, step_in_backward: Callable[[nn.Module], None]
) -> None:
    twins = Twins(MLP())
    if not early:
        twins.backward(_batches(9))
        twins.zero_grad()
    step_in_backward(twins.model)
    optimizer = sgd(twins.reference)
    for number in range(3):
        twins.backward(_batches(number))
        optimizer.step()
        optimizer.zero_grad()
        twins.check()


class _RegistersHooks(MLP):
    """Model whose first forward registers hooks on parameters, in a traced or eager function."""

    def __init__(self, eager: bool) -> None:
        super().__init__()
        self.handles: list[Any] = []
        self.register = torch.compiler.disable(_register) if eager else _register

    def forward(self, x: Tensor) -> Tensor:
        if not self.handles:
            self.register(self)
        return super().forward(x)


def _register(model: _RegistersHooks) -> None:
    model.handles.append(model.up.weight.register_hook(_doubled_and_one))
    model.mid.weight.register_post_accumulate_grad_hook(_add_one_to_grad)


def _doubled_and_one(grad: Tensor) -> Tensor:
    return grad * 2 + 1


def _add_one_to_grad(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.add_(1)


@pytest.mark.parametrize("eager", [True, False])
@on_ranks(2)
def test_forward_may_register_hooks_on_parameters(eager: bool) -> None:
    twins = Twins(_RegistersHooks(eager), fullgraph=False)
    for step in range(4):
        if step == 3:
            for model in (twins.model, twins.reference):
                model.handles[0].remove()
        twins.backward(_batches(step))
        twins.check()
        twins.zero_grad()


@on_ranks(2)
def test_forward_hooks_are_part_of_graph() -> None:
    twins = Twins(MLP())
    for model in (twins.model, twins.reference):
        model.up.register_forward_hook(lambda module, args, out: out + module.bias * 2)
        model.mid.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    twins.train(MLP.batch)


def _halve(module: nn.Module, args: Any) -> Any:
    return (args[0] * 0.5, *args[1:])


def _halve_with_kwargs(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return _halve(module, args), kwargs


def _double(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out * 2


def _double_with_kwargs(module: nn.Module, args: Any, kwargs: Any, out: Tensor) -> Tensor:
    return out * 2


def _double_grads(module: nn.Module, grads: Any, _: Any = None) -> Any:
    return tuple(grad if grad is None else grad * 2 for grad in grads)


def _observe(module: nn.Module, args: Any, out: Any = None) -> None:
    module.__dict__["is_training"] = torch.is_grad_enabled()


def _halve_by_a_parameter(module: nn.Module, args: Any) -> Any:
    return (args[0] * module.get_submodule("up").bias.square().mean(), *args[1:])


class _Method(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(self._scale)

    def _scale(self, module: nn.Module, args: Any) -> Any:
        return (args[0] * self.down.weight.mean(), *args[1:])


MODULE_HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "pre": lambda m: m.register_forward_pre_hook(_halve),
    "pre, kwargs": lambda m: m.register_forward_pre_hook(_halve_with_kwargs, with_kwargs=True),
    "pre, prepended": lambda m: m.register_forward_pre_hook(_halve, prepend=True),
    "pre, eager": lambda m: m.register_forward_pre_hook(torch.compiler.disable(_halve)),
    "pre, reads": lambda m: m.register_forward_pre_hook(_halve_by_a_parameter),
    "post": lambda m: m.register_forward_hook(_double),
    "post, kwargs": lambda m: m.register_forward_hook(_double_with_kwargs, with_kwargs=True),
    "post, always": lambda m: m.register_forward_hook(_double, always_call=True),
    "backward": lambda m: m.register_full_backward_hook(_double_grads),
    "backward, pre": lambda m: m.register_full_backward_pre_hook(_double_grads),
    "inner": lambda m: m.up.register_forward_pre_hook(_halve),
    "inner, backward": lambda m: m.mid.register_full_backward_hook(_double_grads),
    # Read-only: plain torch.compile computes wrong gradients if global hooks change values.
    "global, pre": lambda m: nn.modules.module.register_module_forward_pre_hook(_observe),
    "global, post": lambda m: nn.modules.module.register_module_forward_hook(_observe),
}


TOGETHER = (
    ("pre", "post", "inner"),
    ("pre, kwargs", "post, kwargs"),
    ("pre, prepended", "post, always"),
    ("pre, eager",),
    ("pre, reads",),
    ("backward", "backward, pre", "inner, backward"),
    ("global, pre", "global, post"),
)
"""Hooks registered together; no hook cancels the effect of another."""


@on_ranks(2)
def test_module_hooks_registered_before_compilation_run() -> None:
    assert {name for names in TOGETHER for name in names} == MODULE_HOOKS.keys()
    for names in TOGETHER:
        torch._dynamo.reset()
        model = MLP()
        handles = [MODULE_HOOKS[name](model) for name in names]
        try:
            Twins(model, fullgraph=False).train(MLP.batch, steps=2)
        except Exception as error:
            error.add_note(f"hooks: {names}")
            raise
        finally:
            for handle in handles:
                handle.remove()


@on_ranks(2)
def test_method_of_model_may_be_its_hook() -> None:
    Twins(_Method(), fullgraph=False).train(MLP.batch)


class _Inputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dtypes = nn.Linear(7, 3), set[torch.dtype]()

    def forward(self, x: Tensor) -> Tensor:
        self.dtypes.add(x.dtype)
        return self.linear(x).square().mean()


@on_ranks(2)
def test_first_forward_with_hooks_casts_its_inputs() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
    for name in ("pre", "pre, prepended", "pre, eager", "global, pre"):
        torch._dynamo.reset()
        model = _Inputs()
        handle = MODULE_HOOKS[name](model)
        backend = graphshard.backend(world_mesh(), compiler="aot_eager", mp_policy=policy)
        compiled = torch.compile(model, backend=backend)
        try:
            losses = [compiled(torch.ones(5, 7)) for _ in range(2)]
        finally:
            handle.remove()
        assert [loss.dtype for loss in losses] == [torch.float32] * 2, name
        assert torch.equal(*losses), name
        assert model.dtypes == {torch.bfloat16}, name
