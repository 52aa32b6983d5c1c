"""``python -m graphshard show`` and ``diff``: read what ``dump="folder"`` wrote."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .diff import diff
from .dump import Dump
from .dump_folder import dumps_in
from .table import table


def add_parser(commands: Any) -> None:
    """Add the commands to those of ``python -m graphshard``."""
    text = "show plans as tables"
    parser = commands.add_parser("show", help=text, description=text)
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="a dump, or a folder of dumps"
    )
    parser.add_argument("--all", action="store_true", help="list all buckets, however many")
    parser.set_defaults(run=_reading(_show), parser=parser)
    text = (
        "show what changed from one plan to another; exit status as of diff: 0 nothing, 1 something"
    )
    parser = commands.add_parser("diff", help=text, description=text)
    parser.add_argument("before", type=Path, metavar="A", help="a dump")
    parser.add_argument("after", type=Path, metavar="B", help="a dump")
    parser.set_defaults(run=_reading(_diff), parser=parser)


def _reading(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """A file that cannot be read is an error of the command line: status 2."""

    def checked(args: argparse.Namespace) -> int:
        try:
            return run(args)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return checked


def _show(args: argparse.Namespace) -> int:
    dumps = [Dump.load(path) for given in args.files for path in _files(given)]
    print("\n\n\n".join(table(dump, all_buckets=args.all) for dump in dumps))
    return 0


def _files(given: Path) -> list[Path]:
    found = dumps_in(given) if given.is_dir() else [given]
    if not found:
        raise ValueError(f"{given}: there is no dump in this folder")
    return found


def _diff(args: argparse.Namespace) -> int:
    found = diff(Dump.load(args.before), Dump.load(args.after))
    print(found or "no difference")
    return 1 if found else 0
