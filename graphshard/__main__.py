"""The command line: ``graphshard COMMAND``, or ``python -m graphshard COMMAND``.

Each command has a function that declares its arguments, and a module imported only to run it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from . import __version__, arguments
from .progress import show_line

# Per command: function that declares its arguments, "module:function" that runs it, help text.
COMMANDS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], str, str]] = {
    "plan": (
        arguments.add_plan,
        "forecast.command:plan",
        "forecast a training step on a cluster: time, memory, bottleneck and what would help",
    ),
    "check": (
        arguments.add_check,
        "check.cli:check",
        "compile a training step for a simulated GPU, and report what would fail on it",
    ),
    "demo": (
        arguments.add_demo,
        "tools.demo:launch",
        "train a small GPT with graphshard, DDP and FSDP2 in turn, and compare the three",
    ),
    "show": (arguments.add_show, "show.cli:show", "show plans as tables"),
    "diff": (
        arguments.add_diff,
        "show.cli:compare",
        "show the changes from one plan to another; exit status 1 if there are any",
    ),
    "consolidate": (
        arguments.add_consolidate,
        "tools.consolidate:convert",
        "convert a checkpoint of torch.distributed.checkpoint to one file, or back",
    ),
    "calibrate": (
        arguments.add_calibrate,
        "cost.calibrate:calibrate",
        "measure this machine, for schedule.hardware",
    ),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # argparse prints the usage first, which hides the message if there are many options.
        self.exit(2, f"error  {message}\nmore   {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    script = Path(sys.argv[0]).stem
    prog = script if script == "graphshard" else "python -m graphshard"
    parser = _Parser(prog, description="Tools of graphshard.")
    parser.add_argument("--version", action="version", version=f"graphshard {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (add_arguments, run, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        add_arguments(command)
        command.set_defaults(run=run, parser=command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv``, or in ``sys.argv``, and return its exit status."""
    args, unknown = parser().parse_known_args(argv)
    if unknown:  # ``parse_args`` would point to the help of all commands
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    module, _, function = args.run.partition(":")
    show_line("importing torch's compiler")  # seconds for some commands
    try:
        run = getattr(import_module(f"graphshard.{module}"), function)
        show_line("")
        return int(run(args))
    except argparse.ArgumentTypeError as error:  # incompatible arguments
        args.parser.error(str(error))
    except KeyboardInterrupt:
        pass
    return 130  # the exit status that shells report after Ctrl-C


if __name__ == "__main__":
    sys.exit(main())
