"""The commands ``show`` and ``diff`` of ``python -m graphshard``, which read dumped plans."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..files import write_whole
from .diff import diff
from .dump import Dump
from .dump_folder import dump_paths, folder_page, saving_choices
from .table import saving_table, summary


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands ``show`` and ``diff`` to ``python -m graphshard``."""
    text = "show plans as tables"
    parser = commands.add_parser("show", help=text, description=text)
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="dump, or folder of dumps"
    )
    parser.add_argument("--all", action="store_true", help="list all buckets, even of large plans")
    parser.add_argument(
        "--html",
        type=Path,
        metavar="OUT",
        help="write the HTML page of a folder to this file, instead of printing tables",
    )
    parser.set_defaults(run=_show, parser=parser)
    text = "show the changes from one plan to another; exit status 1 if there are any"
    parser = commands.add_parser("diff", help=text, description=text)
    parser.add_argument("before", type=Path, metavar="A", help="a dump")
    parser.add_argument("after", type=Path, metavar="B", help="a dump")
    parser.set_defaults(run=_diff, parser=parser)


def _show(args: argparse.Namespace) -> int:
    if args.html is not None:
        return _write_page(args)
    dumps = [_load(path) for argument in args.files for path in _files(argument)]
    folders = [argument for argument in args.files if argument.is_dir()]
    tried = [saving_table(choice) for folder in folders for choice in saving_choices(folder)]
    print("\n\n\n".join([summary(dumps, all_buckets=args.all), *tried]))
    return 0


def _write_page(args: argparse.Namespace) -> int:
    folder, *others = args.files
    if others or not folder.is_dir():
        raise argparse.ArgumentTypeError("--html: pass exactly one folder of dumps")
    _files(folder)
    try:
        write_whole(args.html, folder_page(folder))
    except OSError as error:
        raise argparse.ArgumentTypeError(f"--html: {error}") from error
    return 0


def _files(path: Path) -> list[Path]:
    paths = dump_paths(path) if path.is_dir() else [path]
    if not paths:
        raise argparse.ArgumentTypeError(f"{path}: this folder has no dumps")
    return paths


def _diff(args: argparse.Namespace) -> int:
    report = diff(_load(args.before), _load(args.after))
    print(report or "no difference")
    return 1 if report else 0


def _load(path: Path) -> Dump:
    try:
        return Dump.load(path)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
