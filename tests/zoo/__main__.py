"""Train with each framework, compare with its own DDP or FSDP2, and print a table.

    python -m tests.zoo [--only NAME ...] [--out benchmarks/results/integrations.md]

The training loops are those of the tests, on 2 gloo ranks. Frameworks that are not installed are
marked as such. torchtitan may need a separate environment, since it requires other versions of some
packages.
"""

from __future__ import annotations

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

from .launched import call
from .training import compare

STEPS = 20
NOTE = f"""2 CPU ranks over gloo, {STEPS} steps; `aot_eager`. Accelerate, Trainer, SFTTrainer,
Lightning and Fabric train a small Llama of `transformers` with two microbatches per step, gradient
clipping and SGD; torchtitan trains its Qwen3 mixture of experts with activation checkpointing and
AdamW; the plain loop trains a Llama with SGD.

- "loss": largest relative difference of a loss from the peer's. SFTTrainer uses its defaults,
  bfloat16 and checkpointing; the others use float32 (torchtitan's experts compute in bfloat16).
  torchtitan with FSDP2 computes the loss in chunks, whose rounding changes the routing of tokens to
  experts; `whole_loss` compares with FSDP2 with the loss in one piece.
- "saved": a plain model loads the saved full weights, which are bitwise those trained.
- "resumed": a run resumed from a checkpoint ends bitwise like an uninterrupted one; for torchtitan,
  the logged losses and gradient norms of its Llama3 are compared.
- "lines": number of lines that change in a user's script.

"–": not tested with this loop. SFTTrainer resumes like the Trainer."""


@dataclass(frozen=True)
class Found:
    """The results of one framework.

    Attributes:
        loss: largest relative difference of a loss from the peer's.
        saved: whether a plain model loads the saved weights bitwise; None if not tested.
        resumed: whether a resumed training ends bitwise like an uninterrupted one; None if not
            tested.
    """

    loss: float
    saved: bool | None
    resumed: bool | None


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        name: name of the framework.
        package: package whose version is shown.
        peer: implementation to compare with, "DDP" or "FSDP2".
        script: file of the training loop.
        lines: number of lines that change in a user's script.
        measure: function that trains in a folder and returns the results.
    """

    name: str
    package: str
    peer: str
    script: str
    lines: int
    measure: Callable[[str], Found]


def _on_ranks(
    module: str, function: str, *args: Any, backend: str = "gloo", steps: int | None = STEPS
) -> list[Any]:
    found: list[Any] = ranks.run(
        2, call, module, function, *args, backend=backend, steps=steps, timeout_s=900
    )
    return found


def _kept(module: str, function: str, *args: Any) -> dict[str, bool]:
    found = _on_ranks(module, function, *args, steps=None)
    return {
        "saved": all(kept.saved for kept in found),
        "resumed": all(kept.resumed for kept in found),
    }


def _accelerate(folder: str) -> Found:
    losses = [found[0] for found in _on_ranks("test_accelerate", "compare_with_ddp")]
    return Found(max(losses), **_kept("test_accelerate", "save_and_resume", folder))


def _trainer(folder: str) -> Found:
    losses = [found["loss"] for found in _on_ranks("test_trainer", "compare_with_ddp", folder)]
    return Found(max(losses), **_kept("test_trainer", "save_and_resume", folder))


def _sft(folder: str) -> Found:
    found = _on_ranks("test_sft", "compare_with_ddp", folder)
    return Found(max(loss for loss, _ in found), all(saved for _, saved in found), None)


def _lightning(folder: str) -> Found:
    losses = _on_ranks("test_lightning", "compare_with_ddp", folder, backend="recording")
    return Found(max(losses), **_kept("test_lightning", "resume", folder))


def _fabric(folder: str) -> Found:
    found = _on_ranks("test_lightning", "compare_and_resume_by_fabric", folder, backend="recording")
    losses, kept = zip(*found)
    return Found(max(losses), all(k.saved for k in kept), all(k.resumed for k in kept))


def _torchtitan(whole_loss: bool) -> Callable[[str], Found]:
    def measure(folder: str) -> Found:
        loss, _ = call(
            "test_torchtitan", "experts_against_fsdp2", Path(folder), whole_loss, steps=STEPS
        )
        return Found(loss, None, call("test_torchtitan", "resumes", Path(folder)))

    return measure


def _plain_loop(folder: str) -> Found:
    compared = ranks.run(2, compare, "llama", against="fsdp2", steps=STEPS, timeout_s=900)
    kept = call("test_examples", "pretrain_and_resume", Path(folder))
    return Found(max(compared), *kept)


ROWS = [
    Row("Accelerate", "accelerate", "DDP", "test_accelerate.py", 2, _accelerate),
    Row("Trainer", "transformers", "DDP", "test_trainer.py", 2, _trainer),
    Row("SFTTrainer", "trl", "DDP", "test_sft.py", 4, _sft),
    Row("Lightning", "lightning", "DDP", "test_lightning.py", 4, _lightning),
    Row("Fabric", "lightning", "DDP", "test_lightning.py", 2, _fabric),
    Row("torchtitan", "torchtitan", "FSDP2", "torchtitan.train", 1, _torchtitan(False)),
    Row("torchtitan, whole_loss", "torchtitan", "FSDP2", "torchtitan.train", 1, _torchtitan(True)),
    Row("a plain loop", "torch", "FSDP2", "training.py, pretrain.py", 1, _plain_loop),
]


def _cells(row: Row) -> list[object]:
    try:
        version = importlib.metadata.version(row.package)
    except importlib.metadata.PackageNotFoundError:
        return [row.name, f"{row.package} is not installed", row.script, row.peer]
    with tempfile.TemporaryDirectory() as folder:
        found = row.measure(folder)
    print(row.name, found, flush=True)
    words = {None: "–", True: "bitwise", False: "DIFFERS"}
    return [
        row.name,
        f"{row.package} {version}",
        row.script,
        row.peer,
        f"{found.loss:.1e}",
        words[found.saved],
        words[found.resumed],
        row.lines,
    ]


def main() -> None:
    parser = common.new_parser(__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only rows of these packages")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = [row for row in ROWS if args.only is None or row.package in args.only]
    headers = [
        "framework",
        "version",
        "script",
        "peer",
        "loss",
        "saved",
        "resumed",
        "lines",
    ]
    paragraphs = [
        "# Inside other people's training loops",
        f"`python -m tests.zoo`, torch {torch.__version__}",
        NOTE,
        tabulate(list(map(_cells, rows)), headers, tablefmt="github"),
    ]
    text = "\n\n".join(paragraphs) + "\n"
    args.out.write_text(text) if args.out else print(text)


if __name__ == "__main__":
    main()
