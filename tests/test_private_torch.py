"""Private names of torch are used only in ``graphshard/_torch/``.

The test parses all other files. It treats as private

- modules and names of torch with a leading underscore, imported or accessed as attributes,
- an attribute ``x._y`` of any object, unless our own code defines an attribute or function ``_y``,
- the Python stack and the names of torch's frames,
- the names of placeholders in AOTAutograd's graphs.

Operators (``torch.ops...``) are exempt: even public ones may start with an underscore.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

ALLOWED: dict[str, str] = {
    "graphshard/forecast/recipe.py: 'torch._dynamo.config.capture_scalar_outputs = True'": (
        "a line of the user's script; no public name exists"
    )
}
"""Exceptions: "file: expression" -> why a private name may be used outside ``_torch/``."""

FRAME_ATTRIBUTES = {
    *("f_locals", "f_globals", "f_back", "f_code", "f_lineno"),
    *("co_name", "co_qualname", "co_varnames", "co_argcount", "tb_frame"),
    *("_getframe", "currentframe"),
}
FRAME_NAMES = re.compile(r"_call_impl|^compile_wrapper$|torch_dynamo_resume_in")
PLACEHOLDER_NAMES = re.compile(r"^\W*(primals|tangents)_")
PRIVATE_MODULES = re.compile(r"^torch(\.\w+)*\._[a-z]")
ATTRIBUTE_FUNCTIONS = {"getattr", "hasattr", "setattr", "delattr"}
NAMED_TUPLE = {"_replace", "_asdict", "_fields", "_make"}
"""Public attributes of named tuples; the underscore avoids conflicts with field names."""


def _sources() -> Iterator[Path]:
    shims = ROOT / "graphshard" / "_torch"
    for top in (ROOT / "graphshard", ROOT / "passes"):
        yield from (path for path in sorted(top.rglob("*.py")) if shims not in path.parents)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def _own_names(tree: ast.AST) -> set[str]:
    """Return the private names that a file defines, attributes of ``self`` and ``cls`` included."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef | ast.Module):
            targets = [
                target
                for statement in node.body
                for target in _targets(statement)
                if isinstance(target, ast.Name)
            ]
            names.update(target.id for target in targets)
        names.update(
            target.attr
            for target in _targets(node)
            if isinstance(target, ast.Attribute)
            and isinstance(target.value, ast.Name)
            and target.value.id in ("self", "cls")
        )
    return {name for name in names if _is_private(name)}


def _targets(node: ast.AST) -> list[ast.expr]:
    """Return the targets that ``node`` assigns to, with tuples flattened."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = list(node.targets)
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        targets = [node.target]
    flat: list[ast.expr] = []
    for target in targets:
        flat += target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    return flat


class _Finder:
    """Search for uses of private torch names in one file.

    Args:
        own: private names that our own code defines in any file.
    """

    def __init__(self, tree: ast.AST, own: set[str]) -> None:
        self._tree, self._own = tree, own
        self._torch_roots: set[str] = set()  # local names of torch and its modules
        self._other_roots: set[str] = set()  # local names of other imports, and of operators
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._add_roots(node)
            elif isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("torch.ops."):
                names = [target.id for target in _targets(node) if isinstance(target, ast.Name)]
                self._other_roots.update(names)
        # String statements are docstrings, which may mention any name.
        statements = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
        self._docstrings = {id(value) for value in statements if isinstance(value, ast.Constant)}

    def _add_roots(self, node: ast.Import | ast.ImportFrom) -> None:
        module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
        is_relative = isinstance(node, ast.ImportFrom) and node.level > 0
        for alias in node.names:
            path = alias.name if isinstance(node, ast.Import) else f"{module}.{alias.name}"
            name = alias.asname or alias.name.split(".")[0]
            is_torch = path.split(".")[0] == "torch" and not is_relative
            (self._torch_roots if is_torch else self._other_roots).add(name)

    def uses(self) -> Iterator[tuple[int, str, str]]:
        """Yield (line, expression, reason why it is private)."""
        for node in ast.walk(self._tree):
            match node:
                case ast.Import() | ast.ImportFrom():
                    yield from self._imports(node)
                case ast.Attribute(attr=name):
                    yield from self._attribute(node, name)
                case ast.Call(func=ast.Name(id=name), args=[_, ast.Constant(value=str(text)), *_]):
                    if name in ATTRIBUTE_FUNCTIONS and _is_private(text) and not self._is_own(text):
                        yield node.lineno, ast.unparse(node), f"reads {text} by name"
                case ast.Constant(value=str(text)) if id(node) not in self._docstrings:
                    yield from self._string(node, text)

    def _imports(self, node: ast.Import | ast.ImportFrom) -> Iterator[tuple[int, str, str]]:
        if isinstance(node, ast.ImportFrom) and (node.level or not node.module):
            return
        for alias in node.names:
            base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            root, *segments = f"{base}{alias.name}".split(".")
            if root == "torch" and any(map(_is_private, segments)):
                yield node.lineno, f"{base}{alias.name}", "imports a private module or name"

    def _attribute(self, node: ast.Attribute, name: str) -> Iterator[tuple[int, str, str]]:
        text = ast.unparse(node)
        if name in FRAME_ATTRIBUTES:
            yield node.lineno, text, "reads the Python stack"
            return
        if not _is_private(name):
            return
        root, segments = _chain(node)
        if root in self._torch_roots:
            if segments[0] != "ops":
                yield node.lineno, text, "is private in torch"
        elif root not in self._other_roots and not self._is_own(name):
            yield node.lineno, text, f"reads {name}, which no code of ours defines"

    def _string(self, node: ast.Constant, text: str) -> Iterator[tuple[int, str, str]]:
        if FRAME_NAMES.search(text):
            yield node.lineno, repr(text), "names a frame of torch"
        elif PLACEHOLDER_NAMES.match(text):
            yield node.lineno, repr(text), "names placeholders as AOTAutograd does"
        elif PRIVATE_MODULES.match(text):
            yield node.lineno, repr(text), "names a private module"

    def _is_own(self, name: str) -> bool:
        return name in self._own or name in NAMED_TUPLE or name.startswith("_graphshard")


def _chain(node: ast.Attribute) -> tuple[str | None, list[str]]:
    """Return the root of ``root.a.b`` (None if it is not a name) and the attributes in order."""
    segments = []
    value: ast.expr = node
    while isinstance(value, ast.Attribute):
        segments.append(value.attr)
        value = value.value
    return (value.id if isinstance(value, ast.Name) else None), segments[::-1]


def test_private_torch_names_are_used_only_in_torch_package() -> None:
    trees = {path: ast.parse(path.read_text()) for path in _sources()}
    own = set().union(*map(_own_names, trees.values()))
    uses = [
        (str(path.relative_to(ROOT)), *use)
        for path, tree in trees.items()
        for use in _Finder(tree, own).uses()
    ]
    found = [
        f"{path}:{line}: {expression} {reason}; add a function to graphshard/_torch/ and call that"
        for path, line, expression, reason in uses
        if f"{path}: {expression}" not in ALLOWED
    ]
    assert not found, "\n" + "\n".join(found)
    unused = set(ALLOWED) - {f"{path}: {expression}" for path, _, expression, _ in uses}
    assert not unused, "remove unused entries from ALLOWED"


def _found(source: str) -> list[str]:
    tree = ast.parse(textwrap.dedent(source))
    return [expression for _, expression, _ in _Finder(tree, _own_names(tree)).uses()]


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "from torch._guards import Source",
        "from torch.nn.modules import _functions",
        "import torch.distributed.tensor._api as api",
        "import torch\ntorch._C._current_graph_task_id()",
        "import torch.distributed as dist\ndist.distributed_c10d._world",
        "from torch import nn\nnn.Module._version",
        "from torch import fx\nclass A:\n    def f(self): self._own = fx._own",
        "tensor.detach()._version",
        "group._device_types",
        "class A(Module):\n    def f(self): return self._parameters",
        "getattr(module, '_orig_mod', module)",
        "frame.f_locals",
        "frame.f_back.f_code.co_name",
        "import sys\nsys._getframe(1)",
        "name = '_wrapped_call_impl'",
        "name.startswith('primals_')",
        "f'tangents_{i}'",
        "sys.modules['torch._dynamo']",
    ],
)
def test_finder_reports_private_use(source: str) -> None:
    assert _found(source)


@pytest.mark.parametrize(
    "source",
    [
        "from torch.distributed.tensor import DTensor",
        "import torch\ntorch.__version__",
        "import torch\ntorch.ops.aten._scaled_mm.default",
        "import torch\naten = torch.ops.aten\naten._scaled_mm.default",
        "import os\nos._exit(1)",
        "from .._torch.dynamo import Trace",
        "class A:\n    def f(self): self._x = 1\ndef g(a): return a._x",
        "class A:\n    _x: int\ndef g(a): return a._x",
        "def g(row): return row._replace(a=1)",
        "setattr(param, '_graphshard_param', 1)",
        "def f():\n    'Of primals_1 and _call_impl.'",
    ],
)
def test_finder_ignores_public_use(source: str) -> None:
    assert not _found(source)
