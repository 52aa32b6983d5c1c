"""The sdist, the wheel and an editable install provide the intended package.

The top-level folder passes/ is installed as graphshard.passes, and errors in that mapping show only
after installation. So each kind of install gets its own virtual environment, where an isolated
interpreter inspects it without access to the source tree.
"""

import ast
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

import graphshard

ROOT = Path(__file__).resolve().parents[1]
FILES = ("pyproject.toml", "README.md", "LICENSE")
# Folder in the source tree -> installed folder.
FOLDERS = {"graphshard": "graphshard", "passes": "graphshard/passes"}
# Data files (not imported).
DATA = {
    "graphshard/py.typed",
    "graphshard/_torch/no_gpu/no_gpu.cpp",
    "graphshard/cost/devices.toml",
    "graphshard/show/page.html",
}

# Runs inside an environment; prints facts about the installed graphshard as JSON.
LOOK = """
import importlib.metadata, importlib.util, json
import graphshard, graphshard.passes

dist = importlib.metadata.distribution("graphshard")
(entry,) = importlib.metadata.entry_points(group="torch_dynamo_backends", name="graphshard")
print(json.dumps({
    "graphshard": graphshard.__file__,
    "passes": graphshard.passes.__file__,
    "passes_name": graphshard.passes.__name__,
    "top_level_passes": importlib.util.find_spec("passes") is not None,
    "metadata": str(dist.locate_file("")),
    "files": [str(f) for f in dist.files],
    "entry": entry.value,
    "entry_loads": callable(entry.load()),
    "versions": [dist.version, graphshard.__version__],
    "script": [e.value for e in dist.entry_points if e.group == "console_scripts"],
}))
"""


def run(*args: object, cwd: Path) -> str:
    done = subprocess.run(
        [str(arg) for arg in args], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{args}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def modules() -> set[str]:
    return {
        f"{target}/{path.relative_to(ROOT / source).as_posix()}"
        for source, target in FOLDERS.items()
        for path in (ROOT / source).rglob("*.py")
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the packaged files, so that building does not change the source tree."""
    copy = tmp_path_factory.mktemp("source")
    for name in FILES:
        shutil.copy(ROOT / name, copy)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture(scope="module")
def archives(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("dist")
    # Without --sdist and --wheel, build makes the wheel from the sdist.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source, cwd=out)
    (sdist,) = out.glob("*.tar.gz")
    (wheel,) = out.glob("*.whl")
    return {"sdist": sdist, "wheel": wheel}


def environment(path: Path) -> Path:
    """Create an environment that also sees this one's packages; return its interpreter.

    An editable install of graphshard in this environment stays invisible, because Python ignores
    .pth files in folders added by a .pth file. A regular install comes after the environment's own
    graphshard on the path.
    """
    venv.create(path)
    python = path / "bin" / "python"
    inner = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=path)
    outer = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    Path(inner.strip(), "outer.pth").write_text("".join(f"{folder}\n" for folder in sorted(outer)))
    return python


def install_and_look(path: Path, *what: object) -> dict[str, Any]:
    python = environment(path)
    # --ignore-installed: otherwise pip finds the outer environment's graphshard.
    options = ("--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed")
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, *what, cwd=path)
    seen: dict[str, Any] = json.loads(run(python, "-I", "-c", LOOK, cwd=path))
    return seen


def test_sdist_contains_all_build_inputs(archives: dict[str, Path]) -> None:
    with tarfile.open(archives["sdist"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {
        path.relative_to(ROOT).as_posix()
        for name in FOLDERS
        for path in (ROOT / name).rglob("*.py")
    }
    assert {*FILES, *DATA, *sources} <= names


def test_wheel_contains_one_package_with_all_modules(archives: dict[str, Path]) -> None:
    with zipfile.ZipFile(archives["wheel"]) as archive:
        names = set(archive.namelist())
    assert {name for name in names if name.endswith(".py")} == modules()
    assert names >= DATA
    tops = {name.partition("/")[0] for name in names}
    assert len(tops) == 2, tops
    assert all(top == "graphshard" or top.endswith(".dist-info") for top in tops), tops


# The wheel was made from the sdist.
@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_installed_package_is_complete(
    kind: str, source: Path, archives: dict[str, Path], tmp_path: Path
) -> None:
    what = ("--editable", source) if kind == "editable" else (archives[kind],)
    seen = install_and_look(tmp_path, *what)

    metadata = Path(seen["metadata"])
    assert metadata.is_relative_to(tmp_path)
    # An editable install uses the source tree, where passes/ is a top-level folder.
    package = (source if kind == "editable" else metadata) / "graphshard"
    passes = source / "passes" if kind == "editable" else package / "passes"
    assert Path(seen["graphshard"]) == package / "__init__.py"
    assert Path(seen["passes"]) == passes / "__init__.py"
    assert seen["passes_name"] == "graphshard.passes"
    assert not seen["top_level_passes"]
    assert (package / "py.typed").is_file()

    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in seen["files"])
    assert seen["entry"] == "graphshard.dynamo_backend:from_string"
    assert seen["entry_loads"]
    assert seen["versions"] == [graphshard.__version__] * 2
    assert seen["script"] == ["graphshard.__main__:main"]


def test_neither_import_nor_help_loads_dynamo() -> None:
    look = """
import json, sys, torch
before = set(sys.modules)
import graphshard
loaded = sorted(set(sys.modules) - before)
from graphshard.__main__ import parser
parser().parse_args(["plan", "gpt2"])
print(json.dumps([loaded, "torch._dynamo" in sys.modules]))
"""
    loaded, help_loads_dynamo = json.loads(run(sys.executable, "-c", look, cwd=ROOT))
    assert loaded == ["graphshard"]
    assert not help_loads_dynamo


def test_lazy_names_match_typed_names() -> None:
    tree = ast.parse(Path(graphshard.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    typed = {
        alias.name: node.module or alias.name
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == graphshard._MODULES
    assert all(getattr(graphshard, name) is not None for name in graphshard.__all__)
    assert set(graphshard.__all__) <= set(dir(graphshard))
    with pytest.raises(AttributeError, match="no attribute 'bakend'"):
        graphshard.bakend  # noqa: B018


def test_pre_commit_has_the_tested_ruff() -> None:
    (pin,) = re.findall(r"^(ruff==\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert (ROOT / ".pre-commit-config.yaml").read_text().count(f"[{pin}]") == 2
