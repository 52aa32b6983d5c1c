"""The table of allowed imports between units of the code, and tests that the code complies.

A unit is a sub-package or a top-level module of ``graphshard``. The top-level folder ``passes/``
counts as the sub-package ``passes``, as it is installed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).resolve().parents[1]

ALLOWED: dict[str, set[str]] = {
    "_torch": set(),
    "kinds": set(),
    "failures": {"_torch"},
    "files": set(),
    "cpython_tuning": set(),
    "scripts": {"_torch"},
    "tensor_parallel": set(),
    "expert_parallel": {"_torch"},
    "fake_mesh": {"_torch", "expert_parallel"},
    "progress": set(),
    "errors": {"_torch"},
    "ops": {"_torch", "kinds"},
    "planning": {"errors", "kinds"},
    "cost": {"_torch", "files", "kinds", "ops"},
    "ranks": {"_torch", "errors", "kinds", "planning"},
    "show": {"_torch", "cost", "files", "kinds", "planning"},
    "options": {"_torch", "cost", "errors", "ops", "planning"},
    "passes": {"_torch", "cost", "kinds", "ops", "planning"},
    "params": {"_torch", "ranks", "errors", "ops", "options"},
    "optim": {"_torch", "ranks", "ops", "params"},
    "pipeline": {
        "_torch",
        "ranks",
        "cost",
        "errors",
        "files",
        "kinds",
        "ops",
        "options",
        "passes",
        "planning",
        "progress",
        "show",
        "cpython_tuning",
    },
    "dynamo_backend": {
        "_torch",
        "cpython_tuning",
        "ranks",
        "errors",
        "options",
        "params",
        "pipeline",
        "planning",
        "progress",
        "show",
    },
    "__init__": {
        "dynamo_backend",
        "forecast",
        "optim",
        "options",
        "params",
        "pipeline",
        "show",
    },
    "integrations": {"_torch", "dynamo_backend", "options", "params", "ranks", "tools"},
    "tools": {"_torch", "dynamo_backend", "files", "kinds", "params", "show"},
    "check": {
        "_torch",
        "cost",
        "dynamo_backend",
        "expert_parallel",
        "failures",
        "fake_mesh",
        "kinds",
        "ops",
        "options",
        "params",
        "pipeline",
        "planning",
        "scripts",
        "tensor_parallel",
    },
    "forecast": {
        "_torch",
        "dynamo_backend",
        "cost",
        "expert_parallel",
        "failures",
        "fake_mesh",
        "files",
        "kinds",
        "ops",
        "options",
        "params",
        "passes",
        "pipeline",
        "planning",
        "progress",
        "scripts",
        "show",
        "tensor_parallel",
    },
    "arguments": {"forecast", "tools"},
    "__main__": {"__init__", "arguments", "progress"},
}
"""Units that each unit may import."""

MAX_LAYERS = 9
"""Maximum number of layers; a unit is one layer above the highest unit that it imports."""


def _files() -> Iterator[tuple[str, str, Path]]:
    for path in sorted((ROOT / "graphshard").rglob("*.py")):
        parts = path.relative_to(ROOT / "graphshard").parts
        yield Path(parts[0]).stem, ".".join(["graphshard", *parts[:-1]]), path
    for path in sorted((ROOT / "passes").rglob("*.py")):
        yield "passes", "graphshard.passes", path


def _imported(node: ast.AST, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "graphshard")
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*parents, *([node.module] if node.module else [])])
        if base.split(".")[0] == "graphshard":
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _unit(dotted: str) -> str:
    """Return the unit of a dotted name, such as "ops" for ``graphshard.ops.markers.unshard``."""
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ALLOWED else "__init__"


def _imports() -> dict[str, dict[str, set[str]]]:
    found: dict[str, dict[str, set[str]]] = {unit: {} for unit in ALLOWED}
    for unit, package, path in _files():
        for node in ast.walk(ast.parse(path.read_text())):
            for dotted in _imported(node, package):
                if (other := _unit(dotted)) != unit:
                    files = found.setdefault(unit, {}).setdefault(other, set())
                    files.add(str(path.relative_to(ROOT)))
    return found


def test_packages_import_only_allowed_packages() -> None:
    imports = _imports()
    assert set(imports) == set(ALLOWED), "ALLOWED must list exactly the units that exist"
    unexpected = {
        f"{unit} -> {other}": sorted(files)
        for unit, others in imports.items()
        for other, files in others.items()
        if other not in ALLOWED[unit]
    }
    assert not unexpected


def test_all_allowed_imports_are_used() -> None:
    unused = {unit: ALLOWED[unit] - set(others) for unit, others in _imports().items()}
    assert not {unit: others for unit, others in unused.items() if others}


def test_package_imports_are_acyclic() -> None:
    units = nx.DiGraph((unit, other) for unit, others in ALLOWED.items() for other in others)
    assert nx.is_directed_acyclic_graph(units)
    num_layers = nx.dag_longest_path_length(units) + 1
    assert num_layers <= MAX_LAYERS


def test_file_imports_are_acyclic() -> None:
    files = {_module(path, package): path for _, package, path in _files()}
    imports = nx.DiGraph()
    for _, package, path in _files():
        for node in ast.walk(ast.parse(path.read_text())):
            for dotted in _imported(node, package):
                other = dotted if dotted in files else dotted.rpartition(".")[0]
                # An __init__ may re-export names of modules that import its package.
                if other in files and files[other].name != "__init__.py":
                    imports.add_edge(_module(path, package), other)
    assert nx.is_directed_acyclic_graph(imports), nx.find_cycle(imports)


def _module(path: Path, package: str) -> str:
    return package if path.stem == "__init__" else f"{package}.{path.stem}"


def test_no_function_imports_graphshard_modules() -> None:
    hidden = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for _, package, path in _files()
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if list(_imported(node, package))
    ]
    assert not hidden


@pytest.mark.parametrize("unit", sorted(ALLOWED))
def test_packages_have_docstrings(unit: str) -> None:
    init = (ROOT / "passes" if unit == "passes" else ROOT / "graphshard" / unit) / "__init__.py"
    if init.exists():
        assert ast.get_docstring(ast.parse(init.read_text())), f"{init}: no docstring"
