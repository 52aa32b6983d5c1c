"""Run the commands ``show`` and ``diff`` of ``graphshard``, which read dumped plans."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..files import write_output
from .diff import diff, diff_page
from .dump import Dump
from .dump_folder import dump_paths, folder_page, saving_choices
from .table import saving_table, summary


def show(args: argparse.Namespace) -> int:
    """Run the command ``show`` and return its exit status."""
    if args.html is not None:
        return _write_page(args)
    dumps = [dump for argument in args.files for dump in _dumps(argument)]
    folders = [argument for argument in args.files if argument.is_dir()]
    tried = [saving_table(choice) for folder in folders for choice in saving_choices(folder)]
    print("\n\n\n".join([summary(dumps, all_buckets=args.all), *tried]))
    return 0


def _dumps(path: Path) -> list[Dump]:
    """Return the dump in a file, or the readable dumps in a folder; report the others on stderr."""
    dumps = []
    for file in _files(path):
        try:
            dumps.append(_load(file))
        except argparse.ArgumentTypeError as error:
            if not path.is_dir():
                raise
            print(f"not shown: {error}", file=sys.stderr)
    if not dumps:
        raise argparse.ArgumentTypeError(
            f"{path}: no dump in this folder can be read; compile again to write new ones"
        )
    return dumps


def _write_page(args: argparse.Namespace) -> int:
    folder, *others = args.files
    if others or not folder.is_dir():
        given = " ".join(map(str, args.files))
        raise argparse.ArgumentTypeError(f"--html: pass exactly one folder of dumps, not {given}")
    _files(folder)
    write_output("--html", args.html, folder_page(folder))
    return 0


def _files(path: Path) -> list[Path]:
    paths = dump_paths(path) if path.is_dir() else [path]
    if not paths:
        raise argparse.ArgumentTypeError(
            f"{path}: this folder has no dumps; pass the folder of graphshard.backend(dump=...)"
        )
    return paths


def compare(args: argparse.Namespace) -> int:
    """Run the command ``diff``; return 1 if it reports a difference, and 0 otherwise."""
    before, after = _load(args.before), _load(args.after)
    report = diff(before, after)
    if args.html is not None:
        write_output("--html", args.html, diff_page(before, after))
    print(report or "no difference")
    return 1 if report else 0


def _load(path: Path) -> Dump:
    if path.is_dir():
        dumps = ", ".join(map(str, dump_paths(path)))
        advice = f"pass one of its dumps: {dumps}" if dumps else "it has no dumps"
        raise argparse.ArgumentTypeError(f"{path} is a folder: {advice}")
    try:
        return Dump.load(path)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
