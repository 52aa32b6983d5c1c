"""Extract the code blocks of README.md and docs/, and run them on ranks.

The blocks of a page run in order, in one folder. Python blocks share a namespace, which starts with
the names in `common_names`. By default, each Python block gets a new `model`, which is trained for
one step after the block. Shell blocks run on rank 0. An HTML comment before the fence marks a block
as a file, or says why it is not run:

    <!-- file: forecast.py -->
    <!-- not run: needs a GPU -->
"""

from __future__ import annotations

import contextlib
import itertools
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import graphshard
from graphshard.__main__ import main as graphshard_command
from tests.numerics.compare import world_mesh

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
# Replacements that make Python blocks for GPUs run on CPUs, with `aot_eager`. Blocks marked as
# files stay unchanged.
ON_CPU = {
    '"cuda"': '"cpu"',
    ".cuda()": ".cpu()",
    "graphshard.backend(mesh": 'graphshard.backend(mesh, compiler="aot_eager"',
    "graphshard.backend(dp": 'graphshard.backend(dp, compiler="aot_eager"',
    '{"mp_policy": policy})': '{"mp_policy": policy, "compiler": "aot_eager"})',
    "mp_policy=policy)  # the": 'mp_policy=policy, compiler="aot_eager")  # the',
    "=parallelize, mp_policy": '=parallelize, compiler="aot_eager", mp_policy',
    "ShardedFabricStrategy(": 'ShardedFabricStrategy(compiler="aot_eager", ',
    "loader, mp_policy": 'loader, compiler="aot_eager", mp_policy',
    "lightning.Trainer(": "lightning.Trainer(**LIGHTNING, max_steps=1, ",
    "lightning.Fabric(": "lightning.Fabric(**LIGHTNING, ",
}
FILES = {"forecast.py", "passes/count_linears.py", "passes/__init__.py"}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: path of the page, relative to the repository's root.
        line: line number of the opening fence.
        language: language after the fence; "" for a diagram, braces for a Sphinx directive.
        mark: "file" or "not run", from the comment before the fence; "" without a comment.
        text: text after the mark in the comment.
        code: lines between the fences.
    """

    page: str
    line: int
    language: str
    mark: str
    text: str
    code: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> list[Block]:
    fence = re.compile(
        r"(?:^<!-- (?P<mark>file|not run): (?P<text>.+) -->\n)?"
        r"^```(?P<language>.*)\n(?P<code>(?:.*\n)*?)^```$",
        re.MULTILINE,
    )
    content = (ROOT / page).read_text()
    return [
        Block(
            page,
            content[: found.start("code")].count("\n"),
            found["language"],
            found["mark"] or "",
            found["text"] or "",
            found["code"],
        )
        for found in fence.finditer(content)
    ]


def file_of(name: str) -> str:
    (code,) = (b.code for page in PAGES for b in blocks(page) if (b.mark, b.text) == ("file", name))
    return code


def commands(block: Block) -> list[list[str]]:
    return [shlex.split(line, comments=True) for line in block.code.splitlines()]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.norm = nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return (self.norm(x) - 1).square().mean()


def common_names() -> dict[str, Any]:
    loader = [torch.randn(16, 32) for _ in range(3)]
    return {
        "Model": Model,
        "batches": itertools.cycle(loader),
        "contextlib": contextlib,
        "dist": dist,
        "graphshard": graphshard,
        "loader": loader,
        "mesh": world_mesh(),
        "rank": dist.get_rank(),
        "torch": torch,
    }


def renew_model(names: dict[str, Any]) -> None:
    names["model"] = Model()
    # Blocks may have assigned another mesh in ``names``, with an axis of tensor parallelism.
    backend = graphshard.backend(world_mesh(), compiler="aot_eager")
    names["compiled"] = torch.compile(names["model"], backend=backend)


def train_model(names: dict[str, Any]) -> None:
    model = names["model"]
    loss = model(next(names["batches"]))
    loss.backward()
    assert loss.isfinite() and all(param.grad is not None for param in model.parameters())


def run_page(
    page: str,
    folder: Path,
    names: dict[str, Any],
    before: Callable[[dict[str, Any]], None] = renew_model,
    after: Callable[[dict[str, Any]], None] = train_model,
) -> int:
    """Run a page's Python blocks on all ranks and its shell blocks on rank 0; return their number.

    Args:
        folder: working directory, to which blocks marked as files are written.
        before: called with `names` before each Python block.
        after: called with `names` after each Python block.
    """
    number = 0
    with contextlib.chdir(folder):
        for block in blocks(page):
            if block.mark == "file" and dist.get_rank() == 0:
                Path(block.text).parent.mkdir(parents=True, exist_ok=True)
                Path(block.text).write_text(block.code)
            if block.mark or block.language not in ("python", "sh"):
                continue
            number += 1
            if block.language == "python":
                before(names)
                exec(compile(_on_cpu(block.code), block.place, "exec"), names)
                after(names)
            elif dist.get_rank() == 0:
                _run_shell(block)
            dist.barrier()
    return number


def _on_cpu(code: str) -> str:
    for on_gpu, on_cpu in ON_CPU.items():
        code = code.replace(on_gpu, on_cpu)
    return code


def _run_shell(block: Block) -> None:
    for words in commands(block):
        if words[0] == "python" and (words[1] != "-m" or words[3] == "plan"):
            # In a separate process, without a process group.
            subprocess.run([sys.executable, *words[1:]], check=True)
        elif words[:3] == ["python", "-m", "graphshard"]:
            assert graphshard_command(words[3:]) == 0, f"{block.place}: {shlex.join(words)}"
        elif words[0] != "make":
            subprocess.run(words, check=True)
