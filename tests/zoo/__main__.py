"""Trains by every framework for some steps beside its own DDP, and makes a table of it.

    python -m tests.zoo [--out benchmarks/results/integrations.md]

The loops are those of the tests, on 2 gloo ranks.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from benchmarks import common
from tests import ranks

STEPS = 20
NOTE = f"""A small Llama of `transformers`, 2 CPU ranks over gloo, {STEPS} steps of SGD, two
microbatches in each, clipped; `aot_eager`. "loss": the largest relative difference of a loss from
the framework's own DDP. "saved": what is saved is loaded bitwise, and by a plain model where it is
meant to be. "resumed": a training that goes on from a checkpoint ends bitwise as one that was not
interrupted. "lines": of a script that change. SFT trains by its defaults, in bfloat16 with
checkpointing, and resumes as the Trainer does."""


@dataclass(frozen=True)
class Row:
    """One framework.

    Attributes:
        package: whose version is told.
        module: of the test that has the loops, in this folder.
        trains: name of the function that trains beside DDP, and its arguments but a folder.
        loss: finds the loss in what that returns.
        resumes: name of the function that saves and resumes, and its arguments but a folder.
    """

    name: str
    package: str
    module: str
    trains: tuple[str, ...]
    resumes: tuple[Any, ...] | None
    lines: int
    loss: Callable[[Any], float] = lambda found: found
    takes_folder: bool = True
    backend: str = "gloo"


ROWS = [
    Row(
        "Accelerate",
        "accelerate",
        "test_accelerate",
        ("beside_ddp", "no"),
        ("save_and_resume",),
        2,
        lambda found: found[0],
        takes_folder=False,
    ),
    Row(
        "Trainer",
        "transformers",
        "test_trainer",
        ("beside_ddp", False),
        ("save_and_resume",),
        2,
        lambda found: found["loss"],
    ),
    Row("SFTTrainer", "trl", "test_sft", ("beside_ddp",), None, 4),
    Row(
        "Lightning",
        "lightning",
        "test_lightning",
        ("beside_ddp",),
        ("resume", False),
        4,
        backend="recording",
    ),
    Row(
        "Fabric",
        "lightning",
        "test_lightning",
        ("fabric_beside_ddp",),
        None,
        2,
        backend="recording",
    ),
]


def _with_steps(module: str, function: str, *args: Any) -> Any:
    """Call a loop of a test with more steps; runs on a rank."""
    loops = importlib.import_module(f"tests.zoo.{module}")
    before, loops.STEPS = loops.STEPS, STEPS
    try:
        return getattr(loops, function)(*args)
    finally:
        loops.STEPS = before


def _measure(row: Row) -> list[object]:
    with tempfile.TemporaryDirectory() as folder:
        function, *args = row.trains
        given = [str(Path(folder, "trained"))] if row.takes_folder else []
        found = ranks.run(
            2, _with_steps, row.module, function, *given, *args, backend=row.backend, timeout_s=600
        )
        if row.resumes is not None:
            loops = importlib.import_module(f"tests.zoo.{row.module}")
            function, *args = row.resumes
            ranks.run(2, getattr(loops, function), str(Path(folder, "saved")), *args, timeout_s=600)
    version = importlib.metadata.version(row.package)
    loss = max(map(row.loss, found))
    resumed = "bitwise" if row.resumes is not None else "–"
    return [row.name, f"{row.package} {version}", f"{loss:.1e}", "bitwise", resumed, row.lines]


def main() -> None:
    """Print or write the table."""
    parser = common.new_parser(__doc__)
    parser.add_argument("--out", type=Path)
    out: Path | None = parser.parse_args().out
    headers = ["framework", "version", "loss", "saved", "resumed", "lines"]
    paragraphs = [
        "# Inside other people's training loops",
        f"`python -m tests.zoo`, torch {torch.__version__}",
        NOTE,
        tabulate(list(map(_measure, ROWS)), headers, tablefmt="github"),
    ]
    text = "\n\n".join(paragraphs) + "\n"
    out.write_text(text) if out else print(text)


if __name__ == "__main__":
    main()
