"""The command ``python -m graphshard check script.py:make_model --device H100 --world 64``."""

from __future__ import annotations

import argparse

from ..failures import format_failure
from .gpus import GPUS
from .process import CheckError, call
from .report import Report, Target

_EXAMPLE = """
Example script:

    def make_model():
        model = Llama(sizes)                      # on the default device, which is the GPU
        tokens = torch.zeros(2, 4096, dtype=torch.int64)
        return model, (tokens,), {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}

Nothing is allocated and no other rank exists: a laptop can check a model of any size. The loss is
the output's `loss`, or the sum of its first tensor; the optimizer is SGD with momentum.

Exit status: 0 if no error was found, 1 if one was found or the check itself failed, 2 if an
argument is invalid.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``check`` command to ``python -m graphshard``."""
    text = "compile a training step for a simulated GPU, and report what would fail on it"
    parser = commands.add_parser(
        "check",
        help=text,
        description=text,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        metavar="SCRIPT:FUNCTION",
        help="function that returns a model, the inputs of a step and, optionally, options of "
        "graphshard.backend",
    )
    parser.add_argument("--device", default="H100", metavar="GPU", help="default: %(default)s")
    parser.add_argument("--world", type=int, default=8, help="number of ranks (%(default)s)")
    parser.add_argument(
        "--replicas", type=int, default=1, help="number of replicas, as in HSDP (%(default)s)"
    )
    parser.add_argument(
        "--tp",
        type=int,
        default=1,
        help="number of neighboring ranks that tensor parallelism splits the model over "
        "(%(default)s)",
    )
    parser.add_argument(
        "--tp-plan",
        metavar="SCRIPT:FUNCTION",
        help="function FUNCTION(model, mesh) that splits the model with parallelize_module "
        "(default: graphshard.tensor_parallel.parallelize, for transformers models)",
    )
    parser.add_argument(
        "--rank", type=int, default=0, help="rank whose step is checked (%(default)s)"
    )
    parser.add_argument(
        "--timeout", type=float, default=600, metavar="SECONDS", help="time limit (%(default)s)"
    )
    parser.add_argument("--verbose", action="store_true", help="print tracebacks of errors")
    parser.set_defaults(run=_check, parser=parser)


def _check(args: argparse.Namespace) -> int:
    script, function = _validate(args)
    machine = (args.device, args.world, args.replicas, args.rank)
    target = Target(script, function, *machine, args.tp, args.tp_plan)
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
    """Validate the arguments and return the script and the name of its function."""
    script, colon, function = args.model.rpartition(":")
    if not colon or not script:
        raise argparse.ArgumentTypeError(f"{args.model!r}: must be SCRIPT:FUNCTION")
    if args.device not in GPUS:
        known = ", ".join(GPUS)
        raise argparse.ArgumentTypeError(f"--device {args.device}: must be one of {known}")
    sizes = (args.world, args.replicas, args.tp)
    if min(sizes) < 1 or args.world % (args.replicas * args.tp):
        raise argparse.ArgumentTypeError(
            f"--world {args.world} --replicas {args.replicas} --tp {args.tp}: replicas x tp must "
            "divide the world size"
        )
    if args.tp_plan is not None and args.tp == 1:
        raise argparse.ArgumentTypeError(f"--tp-plan {args.tp_plan}: set --tp as well")
    if not 0 <= args.rank < args.world:
        raise argparse.ArgumentTypeError(f"--rank {args.rank}: must be from 0 to {args.world - 1}")
    return script, function
