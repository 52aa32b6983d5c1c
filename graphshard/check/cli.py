"""Run the command ``graphshard check script.py:make_model --device H100 --world 64``."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..failures import format_failure
from .gpus import GPUS
from .process import CheckError, call
from .report import Report, Target


def check(args: argparse.Namespace) -> int:
    """Run ``graphshard check``; return 1 if the model fails or has errors, and 0 otherwise."""
    script, function = _validate(args)
    machine = (args.device, args.world, args.replicas, args.rank)
    target = Target(script, function, *machine, args.tp, args.tp_plan, args.ep)
    try:
        report: Report = call(
            "graphshard.check.report:check", args.device, target, timeout_s=args.timeout
        )
    except CheckError as error:
        print(format_failure(error.failure, args.verbose))
        return 1
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    print(report.text)
    return int(bool(report.errors))


def _validate(args: argparse.Namespace) -> tuple[str, str]:
    script, colon, function = args.model.rpartition(":")
    if not colon or not script:
        raise argparse.ArgumentTypeError(f"{args.model!r}: must be SCRIPT:FUNCTION")
    if args.device not in GPUS:
        known = ", ".join(GPUS)
        raise argparse.ArgumentTypeError(f"--device {args.device}: must be one of {known}")
    sizes = (args.world, args.replicas, args.tp)
    if min(sizes) < 1 or args.world % (args.replicas * args.tp):
        raise argparse.ArgumentTypeError(
            f"--world {args.world} --replicas {args.replicas} --tp {args.tp}: must be positive, "
            "and replicas x tp must divide the world size"
        )
    if args.ep < 1 or (args.ep > 1 and (args.replicas * args.tp > 1 or args.world % args.ep)):
        raise argparse.ArgumentTypeError(
            f"--ep {args.ep}: must be positive and divide --world {args.world}; if it is above 1, "
            "--replicas and --tp must be 1"
        )
    if args.tp_plan is not None and args.tp == 1:
        raise argparse.ArgumentTypeError(f"--tp-plan {args.tp_plan}: needs --tp of at least 2")
    if not 0 <= args.rank < args.world:
        raise argparse.ArgumentTypeError(f"--rank {args.rank}: must be from 0 to {args.world - 1}")
    # Before a process starts, which takes many seconds.
    if not (Path(script).is_file() and script.endswith(".py")):
        raise argparse.ArgumentTypeError(f"{script}: must be an existing Python file")
    return script, function
