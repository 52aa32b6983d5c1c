"""The command line: ``python -m graphshard COMMAND``.

Each command is a module with ``add_parser``, which declares its arguments and the function to run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import __version__
from .check import cli as check
from .cost import calibrate
from .forecast import cli as forecast
from .show import cli as show
from .tools import consolidate, demo, strategies

COMMANDS = (demo, show, strategies, consolidate, calibrate, check, forecast)


def arguments() -> argparse.ArgumentParser:
    """Return the parser for all commands."""
    parser = argparse.ArgumentParser("python -m graphshard", description="Tools of graphshard.")
    parser.add_argument("--version", action="version", version=f"graphshard {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv``, or in ``sys.argv``, and return its exit status."""
    args = arguments().parse_args(argv)
    try:
        return int(args.run(args))
    except argparse.ArgumentTypeError as error:  # incompatible arguments
        args.parser.error(str(error))
    except KeyboardInterrupt:
        pass
    return 130  # the exit status that shells report after Ctrl-C


if __name__ == "__main__":
    sys.exit(main())
