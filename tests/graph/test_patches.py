"""The tables of graphshard's changes to torch are complete and up to date."""

from __future__ import annotations

import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._inductor.lowering import lowerings
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import graphshard
from graphshard._torch.patches import ENTRIES, PATCHES
from graphshard.ops.host_copy import copy_to_device, copy_to_host
from graphshard.ops.markers import UNSHARD_MARKERS

ROOT = Path(graphshard.__file__).parent
HIDDEN = {  # entries in function caches or wrapped by torch, which the search does not find
    "torch._dynamo.variables.torch.TorchInGraphFunctionVariable._get_handlers",
    "torch._dynamo.variables.builder.VariableBuilder._type_dispatch_impl",
    "torch._inductor.lowering.lowerings",
}

NOT_ON_2_11 = {"torch._dynamo.variables.invoke_subgraph.classify_vt"}


def _train(mesh: DeviceMesh) -> None:
    """Train so that every patch gets installed."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    # Without overlap, backward gathers the second weight again.
    schedule = graphshard.SchedulePolicy(overlap=False)
    backend = graphshard.backend(mesh, compiler="aot_eager", schedule=schedule)
    compiled = torch.compile(model, backend=backend)
    compiled(torch.ones(2, 4)).sum().backward()
    torch.optim.SGD(model.parameters()).step()
    graphshard.backend(mesh)  # an unused backend installs optimizer hooks


def _is_ours(value: object) -> bool:
    if isinstance(value, property):
        functions = value.fget, value.fset, value.fdel  # or torch.compiler.disable's wrapper of one
        return any(_is_ours(getattr(f, "_torchdynamo_orig_callable", f)) for f in functions)
    if isinstance(value, FunctionType):
        return Path(value.__code__.co_filename).is_relative_to(ROOT)
    kind = value if isinstance(value, type) else type(value)
    return kind.__module__.startswith("graphshard")


def _changed(owner: Any, path: str, depth: int = 0) -> Iterator[tuple[str, object]]:
    """Yield attributes of a torch module, class or object that hold objects of graphshard."""
    for name, value in list(vars(owner).items()):
        items = list(value.values()) if isinstance(value, dict) else []
        items = list(value) if isinstance(value, (list, tuple, set)) else items
        if _is_ours(value) or any(map(_is_ours, items)):
            yield f"{path}.{name}", value
        is_class = inspect.isclass(value) and value.__module__ == path
        is_object = type(value).__module__ == path and hasattr(value, "__dict__")
        if depth == 0 and (is_class or is_object):
            yield from _changed(value, f"{path}.{name}", depth + 1)


@pytest.mark.filterwarnings("ignore:.*reduce_op")
def test_training_changes_only_torch_names_in_tables(mesh: DeviceMesh) -> None:
    _train(mesh)
    # Excludes Inductor's generated modules, which import our kernel compiler.
    modules = {
        name: module
        for name, module in sys.modules.items()
        if name.partition(".")[0] == "torch" and ".compile_tasks." not in name
    }
    changed = {}
    for name, module in modules.items():
        if inspect.ismodule(module):
            changed |= dict(_changed(module, name))
    listed = {**PATCHES, **ENTRIES}.keys() - HIDDEN
    listed -= NOT_ON_2_11 if torch.__version__ < (2, 13) else set()
    known = {id(_attribute(path)) for path in listed}  # a table may have several names
    assert listed <= changed.keys()
    assert not {path for path, value in changed.items() if id(value) not in known} - listed


def _attribute(path: str) -> object:
    owner, _, name = path.rpartition(".")
    return inspect.getattr_static(pkgutil.resolve_name(owner), name)


def test_hidden_tables_have_our_entries(mesh: DeviceMesh) -> None:
    _train(mesh)
    handlers: dict[object, object] = TorchInGraphFunctionVariable._get_handlers()
    assert set(UNSHARD_MARKERS) <= handlers.keys()
    dispatch: Callable[..., Any] = VariableBuilder._type_dispatch_impl
    assert all(_is_ours(dispatch(numpy)[DTensor]) for numpy in (False, True))
    assert {copy_to_device, copy_to_host} <= lowerings.keys()
