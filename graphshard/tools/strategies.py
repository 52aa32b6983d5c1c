"""Command ``python -m graphshard strategies``: names of strategies here and elsewhere."""

from __future__ import annotations

import argparse
from pathlib import Path

from tabulate import tabulate

TABLE = Path(__file__).with_name("strategies.md")  # docs/coming_from.md contains it


def print_strategies(_: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    lines = TABLE.read_text().replace("`", "").splitlines()
    header, _rule, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    print(tabulate(rows, header, disable_numparse=True))
    return 0
