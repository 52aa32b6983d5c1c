"""Per-call storage: see [Note: call scope] in graphshard/_torch."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from graphshard._torch.frames import call_scope, compiled_call, frames, is_resumed


class _Value:
    """An object that supports weak references."""


class _Calls:
    """Log of reads: each scope's id, whether it already had a value, and the new values."""

    def __init__(self) -> None:
        self.scopes: list[int] = []
        self.found: list[bool] = []
        self.values: list[weakref.ref[_Value]] = []

    @torch.compiler.disable
    def read(self) -> None:
        scope = call_scope(lambda module: isinstance(module, _Part))
        assert scope is not None
        self.scopes.append(id(scope))
        self.found.append(self in scope)
        if self not in scope:
            scope[self] = _Value()
            self.values.append(weakref.ref(scope[self]))
        assert self.values[-1]() is scope[self]

    def alive(self) -> list[bool]:
        return [value() is not None for value in self.values]


class _Part(nn.Module):
    def __init__(self, calls: _Calls) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, x: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
        self.calls.read()
        x = x.sin()
        torch._dynamo.graph_break()
        assert all(isinstance(name, str) for name in others) and len(others) <= 1
        x = x.cos()
        self.calls.read()
        return x


class _Model(nn.Module):
    """Calls a part twice. Scopes belong to calls of `_Part`, not of this class."""

    def __init__(self, calls: _Calls) -> None:
        super().__init__()
        self.part = _Part(calls)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(self.part(x, scale=x))


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend="eager")  # type: ignore[no-any-return]


@pytest.mark.parametrize("wrap", [lambda model: model, _compiled])
def test_scope_lives_as_long_as_call_of_part(wrap: Callable[..., Any]) -> None:
    calls = _Calls()
    model = wrap(_Model(calls))
    for _ in range(2):
        model(torch.ones(3))
    assert calls.found == [False, True] * 4
    assert calls.alive() == [False] * 4


@pytest.mark.parametrize("hooks", [False, True])
def test_compiled_part_has_scope_of_its_call(hooks: bool) -> None:
    calls = _Calls()
    part = _Part(calls)
    if hooks:
        part.register_forward_pre_hook(lambda module, args: None)
    compiled = _compiled(part)
    for _ in range(2):
        compiled(torch.ones(3), scale=torch.ones(3))
    assert calls.found == [False, True] * 2
    assert calls.alive() == [False] * 2


def test_compiled_function_has_its_own_scope() -> None:
    calls = _Calls()

    def function(x: torch.Tensor) -> torch.Tensor:
        calls.read()
        x = x.sin()
        calls.read()
        return x

    compiled = _compiled(function)
    for _ in range(2):
        compiled(torch.ones(3))
    assert calls.found == [False, True] * 2
    assert calls.alive() == [False] * 2


def test_error_ends_scope() -> None:
    calls = _Calls()
    part = _Part(calls)
    with pytest.raises(AssertionError):
        part(torch.ones(3), one=torch.ones(3), two=torch.ones(3))
    # The scope itself is still alive: pytest keeps the traceback and its frames.
    assert calls.found == [False]
    part(torch.ones(3))
    assert calls.found == [False, False, True]


def test_read_outside_of_call_has_no_scope() -> None:
    assert call_scope(lambda module: True) is None
    calls = _Calls()
    _Part(calls)(torch.ones(3))
    assert call_scope(lambda module: True) is None


def test_other_modules_have_no_scope() -> None:
    scopes = []

    class Other(nn.Module):
        def forward(self) -> None:
            scopes.append(call_scope(lambda module: isinstance(module, _Part)))

    Other()()
    assert scopes == [None]


def test_bare_forward_and_recomputation_get_new_scopes() -> None:
    calls = _Calls()
    _Part(calls).forward(torch.ones(3))
    assert calls.found == [False, False]
    x = torch.ones(3, requires_grad=True)
    scopes = []

    def function(x: torch.Tensor) -> torch.Tensor:
        scopes.append(call_scope(lambda module: False))
        return x.sin()

    checkpoint(function, x, use_reentrant=False).sum().backward()
    assert scopes == [{}, {}]


def test_frames_of_compiled_call_have_expected_names() -> None:
    seen: list[tuple[nn.Module | None, Any, bool]] = []

    @torch.compiler.disable
    def look() -> None:
        call = compiled_call()
        seen.append((call.module, call.backend, any(is_resumed(f.f_code) for f in frames())))

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        return gm.forward

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            look()
            x = x.sin()
            look()
            return x.cos()

    model = Model()
    torch._dynamo.reset()
    torch.compile(model, backend=backend)(torch.ones(3))
    assert seen == [(model, backend, False), (model, backend, True)]
