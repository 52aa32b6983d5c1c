"""`compile_request`: the torch.compile call that is reading a backend's ``__name__``.

See [Note: first forward] in graphshard/params/first_forward.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from graphshard._torch.frames import compile_request


class Named:
    def __init__(self) -> None:
        self.given: list[object] = []
        self.off: list[bool] = []
        self.in_place: list[bool] = []

    @property
    def __name__(self) -> str:
        request = compile_request()
        assert request is not None
        self.given.append(request.given)
        self.off.append(request.is_off)
        self.in_place.append(request.in_place)
        return "named"

    def __call__(self, gm: Any, inputs: Any) -> Any:
        return gm


def test_compile_request_has_module_of_torch_compile() -> None:
    backend, module = Named(), nn.Linear(2, 2)
    torch.compile(module, backend=backend)
    assert backend.given and all(given is module for given in backend.given)
    assert not any(backend.in_place)


def test_compile_request_has_module_of_module_compile() -> None:
    backend, module = Named(), nn.Linear(2, 2)
    module.compile(backend=backend)
    assert backend.given and all(given is module for given in backend.given)
    assert all(backend.in_place)


def test_compile_request_has_module_of_compiled_method() -> None:
    backend, module = Named(), nn.Linear(2, 2)
    torch.compile(module.forward, backend=backend)
    assert not any(backend.in_place) and all(given is module for given in backend.given)


def test_compile_request_has_function_of_torch_compile() -> None:
    backend = Named()
    function = lambda x: x + 1  # noqa: E731
    torch.compile(function, backend=backend)
    assert backend.given and all(given is function for given in backend.given)
    assert compile_request() is None


def test_compile_request_knows_whether_compilation_is_disabled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend, module = Named(), nn.Linear(2, 2)
    torch.compile(module, backend=backend)
    assert not any(backend.off)
    backend.off.clear()
    assert torch.compile(module, backend=backend, disable=True) is module
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert torch.compile(module, backend=backend) is module
    assert backend.off and all(backend.off)
