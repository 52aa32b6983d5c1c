"""Arguments of the commands of ``graphshard``.

Modules that run a command import Dynamo, which takes seconds. This module does not, which keeps
``--help`` and argument errors fast.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from .forecast.public_models import PUBLIC_MODELS
from .tools.demo_model import SIZES

_MODELS = f"""
MODEL is one of
  FILE.py:FUNCTION     a function that returns a model and the inputs of a step on one rank
  FOLDER               a folder with the config.json of a transformers model
  OWNER/NAME           a model on the Hugging Face Hub whose config.json has been downloaded
  FAMILY:key=value,..  a transformers configuration: llama:hidden_size=8192,num_hidden_layers=80
  NAME                 a public model: {", ".join(PUBLIC_MODELS)}

--search, --largest and --formula vary the batch size or the model, so they do not take
FILE.py:FUNCTION.

--tp splits configurations with graphshard.tensor_parallel.parallelize, much as torchtitan does:
attention and feed-forward by the configuration's base_model_tp_plan, embedding and head along the
vocabulary (the loss does not gather logits), norms and residual along the sequence
(SequenceParallel). Models with experts, and models without a base_model_tp_plan, need --tp-plan.

--ep splits experts with graphshard.expert_parallel.parallelize. It takes transformers models whose
expert weights are stacked in gate_up_proj and down_proj, such as Mixtral and Qwen3-MoE.

Exit status: 0 if the step fits, 1 if it does not, 2 after an error.
"""


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``graphshard plan``."""
    parser.epilog = _MODELS
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("model", metavar="MODEL", help="see below")
    add(
        "--device", default="H100", metavar="GPU", help="name, or file from calibrate (%(default)s)"
    )
    add("--gpus", type=int, default=8, help="total number of GPUs (%(default)s)")
    add(
        "--nodes",
        type=int,
        help="number of nodes (the fewest equal nodes with no more GPUs than usual)",
    )
    add(
        "--batch",
        help="samples x tokens, or samples, per GPU or, with --tp, per group of GPUs (1x4096; "
        "FILE.py:FUNCTION sets its own)",
    )
    add(
        "--tp",
        type=int,
        help="number of neighboring GPUs that share a batch and split the model by tensor and "
        "sequence parallelism, see below (1; with --search, all powers of two within a node)",
    )
    add(
        "--tp-plan",
        metavar="FILE.py:FUNCTION",
        help="split the model with FUNCTION(model, mesh) instead of as described below",
    )
    add(
        "--ep",
        type=int,
        default=1,
        help="number of neighboring GPUs that experts are split over; each has its own batch "
        "(%(default)s)",
    )
    # No default where --search or --largest chooses, to notice that the user has chosen as well.
    add(
        "--strategy",
        help="zero3, zero2, hsdp:N (shards over N ranks), hpz:N (backward gathers from N ranks) or "
        "ddp (zero3)",
    )
    add("--optimizer", default="adamw", help="adamw, adam, momentum or sgd (%(default)s)")
    add(
        "--dtype",
        "--precision",
        help="bf16, fp8 or float32 (bf16; --search: bf16 and, where the GPU has it, fp8)",
    )
    add(
        "--recompute",
        type=_fraction,
        nargs="?",
        const=1.0,
        metavar="FRACTION",
        help="recompute the first FRACTION of the layers in backward (without FRACTION: all)",
    )
    add(
        "--reduce",
        choices=("ring", "exchange", "auto"),
        default="ring",
        help="how gradients are reduced: SchedulePolicy(reduce=...) (%(default)s)",
    )
    offload = "keep shards, gradients and optimizer state on the host"
    add("--offload", action="store_true", default=None, help=offload)
    add("--accumulate", type=int, help="microbatches in a step (1)")
    add("--budget", metavar="72GB", help="GPU memory that the schedule may use")
    add("--memory", metavar="80GB", help="memory of each GPU (from the device table)")
    add("--link", metavar="100Gb/s,5us", help="bandwidth per GPU and latency between nodes")
    add(
        "--search",
        action="store_true",
        help="compare strategies, precisions, microbatch sizes, recomputation, offload and tensor "
        "parallelism at the same batch size per GPU and step",
    )
    add(
        "--largest",
        action="store_true",
        help="print the largest model of the family and the largest batch that fit, without --html "
        "or --json",
    )
    add(
        "--formula",
        action="store_true",
        help="print the size of what forward saves for backward as a formula in samples and tokens",
    )
    add("--html", type=_file, metavar="OUT", help="write an HTML page to this file")
    add(
        "--json",
        type=_file,
        metavar="OUT",
        help="write the forecast and, with --search, all recipes to this JSON file",
    )
    add("--verbose", action="store_true", help="print tracebacks of errors")


def _fraction(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: must be a number from 0 to 1, or omitted; if this is MODEL, put it "
            "before the options"
        ) from None


_EXAMPLE = """
Example script:

    def make_model():
        model = Llama(sizes)                      # on the default device, which is the GPU
        tokens = torch.zeros(2, 4096, dtype=torch.int64)
        return model, (tokens,), {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}

No tensor is allocated and no other rank exists: a laptop can check a model of any size. The loss is
the output's `loss` or else its first tensor, summed unless a scalar; the optimizer is SGD with
momentum.

Exit status: 0 if no error was found, 1 if one was found or the check itself failed, 2 if an
argument is invalid.
"""


def add_check(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``graphshard check``."""
    parser.epilog = _EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "model",
        metavar="SCRIPT:FUNCTION",
        help="function that returns a model, the inputs of a step and, optionally, options of "
        "graphshard.backend",
    )
    parser.add_argument(
        "--device", default="H100", metavar="GPU", help="simulated GPU (%(default)s)"
    )
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
        "--ep",
        type=int,
        default=1,
        help="number of neighboring ranks that graphshard.expert_parallel.parallelize splits "
        "experts over (%(default)s)",
    )
    parser.add_argument(
        "--rank", type=int, default=0, help="rank whose step is checked (%(default)s)"
    )
    parser.add_argument(
        "--timeout", type=_seconds, default=600, metavar="SECONDS", help="time limit (%(default)s)"
    )
    parser.add_argument("--verbose", action="store_true", help="print tracebacks of errors")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a positive number of seconds")
    return seconds


def add_demo(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``graphshard demo``."""
    steps = ", ".join(f"{size.steps} on {device}" for device, size in SIZES.items())
    add = parser.add_argument
    ranks = "number of ranks (default: all GPUs, or 2 without a GPU)"
    add("--ranks", type=_at_least(1), metavar="N", help=ranks)
    add("--steps", type=_at_least(2), metavar="N", help=f"number of steps (default: {steps})")
    add(
        "--compiler",
        choices=("inductor", "aot_eager"),
        default="inductor",
        help="compiler of all three runs (default: %(default)s)",
    )
    device = "device to train on (default: cuda if there is a GPU, else cpu)"
    add("--device", choices=list(SIZES), help=device)
    page = "write the page of graphshard's run to this file"
    add("--html", type=_file, metavar="FILE", help=page)


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: must be an integer of at least {least}")
        return int(text)

    return parse


def add_show(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``graphshard show``."""
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


def add_diff(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``graphshard diff``."""
    parser.add_argument("before", type=Path, metavar="A", help="a dump")
    parser.add_argument("after", type=Path, metavar="B", help="a dump")
    parser.add_argument(
        "--html", type=Path, metavar="OUT", help="also write a page of both plans to this file"
    )


def add_consolidate(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``graphshard consolidate``."""
    parser.add_argument("source", help="folder of a checkpoint, or a file")
    parser.add_argument("target", help="file (.pt or .safetensors), or a folder")
    parser.add_argument("--key", help="convert only this top-level key, such as model")
    parser.add_argument(
        "--strip-prefix",
        metavar="PREFIX",
        help="remove this prefix from the names that have it, such as net. for a LightningModule",
    )


_CALIBRATE = """Measure this machine, and write its rates to a file for ``schedule.hardware``.

    python -m graphshard calibrate --out machine.json                        one device
    torchrun --nproc-per-node 8 -m graphshard calibrate --out machine.json   and its interconnects

This measures matrix products by dtype and size; copies by size on the device, from the host, and
within host memory; exponentials; an empty kernel; and, with several ranks, collectives by size,
launched as in compiled graphs. All ranks measure at the same time, and the file holds the medians
of rank 0. Operands rotate through more memory than the caches hold, as in training. The device
table supplies the rates of fp8 and of interconnects that these ranks do not span, and the compute
time lost to overlapped collectives.
"""


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``graphshard calibrate``."""
    parser.description = _CALIBRATE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=_file, required=True, help="the JSON file to write")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU, else cpu"
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repetitions")
    parser.add_argument(
        "--sizes", type=_sizes, help="collective buffer sizes in bytes, as in 65536,16777216"
    )


def _file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: must be a file in a folder that exists")
    return path


def _sizes(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: must be sizes in bytes, as in 65536,1048576")
    return tuple(sorted({int(part) for part in parts}))
