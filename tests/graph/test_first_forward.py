"""torch.compile reads a backend's name while it is given a module: [Note: first forward]."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from graphshard._torch.frames import module_to_compile


class Named:
    """A backend that notes which module torch.compile has when it reads the backend's name."""

    def __init__(self) -> None:
        self.modules: list[nn.Module | None] = []

    @property
    def __name__(self) -> str:
        self.modules.append(module_to_compile())
        return "named"

    def __call__(self, gm: Any, inputs: Any) -> Any:
        return gm


def test_torch_compile_reads_the_name_while_it_has_the_module() -> None:
    backend, module = Named(), nn.Linear(2, 2)
    torch.compile(module, backend=backend)
    assert backend.modules and all(found is module for found in backend.modules)


def test_compile_of_a_module_reads_the_name_too() -> None:
    backend, module = Named(), nn.Linear(2, 2)
    module.compile(backend=backend)
    assert backend.modules and all(found is module for found in backend.modules)


def test_a_function_is_no_module() -> None:
    backend = Named()
    torch.compile(lambda x: x + 1, backend=backend)
    assert backend.modules and all(found is None for found in backend.modules)
    assert module_to_compile() is None
