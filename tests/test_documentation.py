"""Run all code blocks of README.md and docs/, except those marked "not run".

`tests/documentation.py` defines the marks; `tests/zoo/test_documentation.py` runs the blocks that
need frameworks.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest
from torch.distributed.fsdp import FSDPModule, fully_shard

import graphshard
import graphshard.passes
import graphshard.show
from graphshard.__main__ import COMMANDS, parser

from . import ranks
from .documentation import (
    FILES,
    PAGES,
    ROOT,
    blocks,
    commands,
    common_names,
    file_of,
    renew_model,
    run_page,
)


@pytest.mark.parametrize("page", PAGES)
def test_blocks_have_known_marks_languages_and_commands(page: str) -> None:
    for block in blocks(page):
        assert block.mark != "file" or block.text in FILES, block.place
        assert block.language in ("", "python", "sh") or block.language[0] == "{", block.place
        if block.language == "sh" and block.mark != "not run":
            for command in commands(block):
                check_command(command, block.place)


def check_command(words: list[str], place: str) -> None:
    """Fail if a command does not exist or no test runs it."""
    match words:
        case ["make", target]:
            assert f"\n{target}:" in (ROOT / "Makefile").read_text(), f"{place}: {target}"
        case ["python", "-m", "graphshard", *rest]:
            parser().parse_args(rest)
        case ["cp", "-r", "folder", "old"]:
            pass
        case ["python", script] if script in FILES:
            pass
        case _:
            pytest.fail(f"{place}: {shlex.join(words)} is not run; say why, in a comment before it")


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page not in ("docs/frameworks.md", "docs/how_it_works.md")]
)
def test_blocks_run(page: str, tmp_path: Path) -> None:
    if any(block.language in ("python", "sh") for block in blocks(page)):
        ranks.run(2, _run_page_on_rank, page, tmp_path)


def _run_page_on_rank(page: str, folder: Path) -> int:
    return run_page(page, folder, common_names())


def test_notebook_runs_on_one_rank() -> None:
    notebook = json.loads((ROOT / "examples/tour.ipynb").read_text())
    sources = [(cell, "".join(cell["source"])) for cell in notebook["cells"]]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell, _ in sources)
    code = [text for cell, text in sources if cell["cell_type"] == "code"]
    script = f"{_SHOW}\n" + "\n".join(f"run({text!r})" for text in code)
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", done.stdout)]
    assert len(losses) == 4 and losses[-1] < losses[0] / 2
    assert "'measured_us': " in done.stdout and "<title>graphshard plan" in done.stdout
    assert "what would help" in done.stdout and "MFU" in done.stdout


# Runs a cell, and prints the value of an expression at its end as a notebook would show it.
_SHOW = """
import ast, html
def run(code):
    *body, last = ast.parse(code).body
    is_value = isinstance(last, ast.Expr)
    exec(compile(ast.Module(body if is_value else [*body, last], []), "cell", "exec"), globals())
    if is_value:
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), globals())
        as_html = getattr(value, "_repr_html_", None)
        print(html.unescape(as_html()) if as_html else value)
"""


def test_documented_pass_can_be_added(tmp_path: Path) -> None:
    assert ranks.run(1, _add_pass) == [["2 linears"]]


def _add_pass() -> list[str]:
    name = "graphshard.passes.count_linears"
    sys.modules[name] = module = types.ModuleType(name)
    exec(file_of("passes/count_linears.py"), vars(module))
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    before = graphshard.passes.PIPELINE
    try:
        exec(file_of("passes/__init__.py"), vars(graphshard.passes))
        names = common_names()
        renew_model(names)
        names["compiled"](names["loader"][0]).backward()
    finally:
        graphshard.passes.PIPELINE = before
        del sys.modules[name]
    return messages


def test_chart_of_readme_shows_measured_numbers() -> None:
    chart, race = ((ROOT / f"benchmarks/results/race.{kind}").read_text() for kind in ("svg", "md"))
    steps = re.findall(r">(\d+\.\d)<", chart)
    assert len(steps) == 4 and all(f" {step} |" in race for step in steps)


def test_page_for_fsdp2_names_its_arguments_and_methods() -> None:
    page = (ROOT / "docs/fsdp2.md").read_text()
    names = [name for name in vars(FSDPModule) if not name.startswith("_")]
    names += [name for name in inspect.signature(fully_shard).parameters]
    assert len(names) > 20
    assert not [name for name in names if not re.search(rf"`{name}\b", page)]


def test_reference_lists_all_public_names_and_commands() -> None:
    api, pages = (ROOT / "docs/api.md").read_text(), (ROOT / "docs/commands.md").read_text()
    names = {*graphshard.__all__, *graphshard.show.__all__} - {"__version__"}
    missing = [name for name in names if not re.search(rf":: {name}(\(\))?$", api, re.MULTILINE)]
    assert not missing
    help_text = parser().format_help()
    known = re.findall(r"^    (\w+)\b", help_text, re.MULTILINE)
    assert len(known) >= len(COMMANDS)
    assert not [name for name in known if f"{{command-help}} {name}\n" not in pages]
