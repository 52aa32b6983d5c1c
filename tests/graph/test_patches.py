"""The table of what graphshard changes in torch is complete, and nothing in it is out of date."""

from __future__ import annotations

import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import graphshard
from graphshard._torch.patches import ENTRIES, PATCHES
from graphshard.ops.markers import UNSHARD_MARKERS

ROOT = Path(graphshard.__file__).parent
CACHED = {  # tables that are results of cached functions, which a search cannot see
    "torch._dynamo.variables.torch.TorchInGraphFunctionVariable._get_handlers",
    "torch._dynamo.variables.builder.VariableBuilder._type_dispatch_impl",
}


def _train(mesh: DeviceMesh) -> None:
    """Do what installs every patch: compile, train, and load the optimizer's state."""
    model = torch.compile(nn.Linear(4, 4), backend=graphshard.backend(mesh, compiler="aot_eager"))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    graphshard.backend(mesh)  # unused, so steps are watched


def _is_ours(value: object) -> bool:
    if isinstance(value, property):
        return any(map(_is_ours, (value.fget, value.fset, value.fdel)))
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    if inspect.iscode(code):
        return Path(code.co_filename).is_relative_to(ROOT)
    is_operator = isinstance(value, torch._ops.OpOverload)
    if is_operator:
        return value.namespace == "graphshard"
    return type(value).__module__.startswith("graphshard")


def _changed(owner: Any, path: str, depth: int = 0) -> Iterator[tuple[str, object]]:
    """Yield attributes of a module, class or object of torch that hold something of graphshard."""
    for name, value in list(vars(owner).items()):
        items = list(value.values()) + list(value) if type(value) is dict else []
        items = list(value) if isinstance(value, (list, tuple, set)) else items
        if _is_ours(value) or any(map(_is_ours, items)):
            yield f"{path}.{name}", value
        is_class = inspect.isclass(value) and value.__module__ == path
        is_object = type(value).__module__ == path and hasattr(value, "__dict__")
        if depth == 0 and (is_class or is_object):
            yield from _changed(value, f"{path}.{name}", depth + 1)


def test_training_changes_what_the_tables_list_and_nothing_else(mesh: DeviceMesh) -> None:
    _train(mesh)
    modules = {n: m for n, m in sys.modules.items() if n.partition(".")[0] == "torch"}
    changed = {}
    for name, module in modules.items():
        if inspect.ismodule(module):
            changed |= dict(_changed(module, name))
    listed = {**PATCHES, **ENTRIES}.keys() - CACHED
    known = {id(_attribute(path)) for path in listed}  # a table may have several names
    assert listed <= changed.keys()
    assert not {path for path, value in changed.items() if id(value) not in known} - listed


def _attribute(path: str) -> object:
    owner, _, name = path.rpartition(".")
    return inspect.getattr_static(pkgutil.resolve_name(owner), name)


def test_the_cached_tables_have_our_entries(mesh: DeviceMesh) -> None:
    _train(mesh)
    handlers: dict[object, object] = TorchInGraphFunctionVariable._get_handlers()
    assert set(UNSHARD_MARKERS) <= handlers.keys()
    dispatch: Callable[..., Any] = VariableBuilder._type_dispatch_impl
    assert all(_is_ours(dispatch(numpy)[DTensor]) for numpy in (False, True))
