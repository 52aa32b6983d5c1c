"""Command ``python -m graphshard strategies``: names of strategies here and elsewhere."""

from __future__ import annotations

import argparse
from pathlib import Path

from tabulate import tabulate

TABLE = Path(__file__).with_name("strategies.md")  # docs/coming_from.md contains it


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``strategies`` command to ``python -m graphshard``."""
    text = "show the names of strategies and features in FSDP, TorchAcc, DeepSpeed and graphshard"
    parser = commands.add_parser("strategies", help=text, description=text)
    parser.set_defaults(run=_run, parser=parser)


def _run(_: argparse.Namespace) -> int:
    lines = TABLE.read_text().replace("`", "").splitlines()
    header, _rule, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    print(tabulate(rows, header, disable_numparse=True))
    return 0
