"""Command ``python -m graphshard plan MODEL --device H100 --gpus 64 --nodes 8 --batch 1x8192``."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Callable
from pathlib import Path

from ..files import write_whole
from ..scripts import load_function
from .cluster import Cluster, cluster
from .formula import formula_text, saved_bytes
from .largest import largest
from .plan import forecast
from .public_models import PUBLIC_MODELS
from .recipe import OPTIMIZERS, STRATEGIES, Recipe
from .report import forecast_page
from .search import search
from .workload import (
    BatchShape,
    Workload,
    config_workload,
    find_config,
    find_workload,
    is_config,
    scale_config,
)

_MODELS = f"""
MODEL is one of
  FILE.py:FUNCTION     a function that returns a model and the inputs of a step on one rank
  FOLDER               with the config.json of a transformers model
  FAMILY:key=value,..  a transformers configuration: llama:hidden_size=8192,num_hidden_layers=80
  NAME                 a public model: {", ".join(PUBLIC_MODELS)}

--tp splits configurations with graphshard.tensor_parallel.parallelize, much as torchtitan does:
attention and feed-forward by the configuration's base_model_tp_plan, embedding and head along the
vocabulary, norms and residual along the sequence (SequenceParallel). Logits are gathered. Models
with experts, and models without a base_model_tp_plan, need --tp-plan.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``plan`` to ``python -m graphshard``."""
    text = "forecast a training step on a cluster: time, memory, bottleneck and what would help"
    parser = commands.add_parser(
        "plan",
        help=text,
        description=text,
        epilog=_MODELS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="see below")
    add(
        "--device", default="H100", metavar="GPU", help="name, or file from calibrate (%(default)s)"
    )
    add("--gpus", type=int, default=8, help="total number of GPUs (%(default)s)")
    add("--nodes", type=int, help="number of nodes (as few as the device's usual node size allows)")
    add(
        "--batch",
        default="1x4096",
        help="samples x tokens per GPU (or --tp GPUs), or samples (%(default)s)",
    )
    add(
        "--tp",
        type=int,
        help="number of neighboring GPUs that tensor and sequence parallelism split the model over "
        "(1; with --search, all powers of two within a node): see below; they share a batch",
    )
    add(
        "--tp-plan",
        metavar="FILE.py:FUNCTION",
        help="function FUNCTION(model, mesh) to split the model with instead",
    )
    add("--strategy", default="zero3", help=f"{STRATEGIES} (%(default)s)")
    add("--optimizer", default="adamw", help=f"one of {', '.join(OPTIMIZERS)} (%(default)s)")
    add("--dtype", default="bf16", help="float32, bf16 or fp8 (%(default)s)")
    add(
        "--recompute",
        type=_fraction,
        nargs="?",
        const=1.0,
        default=0.0,
        metavar="FRACTION",
        help="recompute the first FRACTION of the layers in backward (without FRACTION: all)",
    )
    add("--offload", action="store_true", help="keep shards, gradients and optimizer on the host")
    add("--accumulate", type=int, default=1, help="microbatches in a step (%(default)s)")
    add("--budget", metavar="72GB", help="GPU memory that the schedule may use")
    add("--memory", metavar="80GB", help="memory of each GPU, if the device table lacks the GPU")
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
        help="print the largest model of the family and the largest batch that fit",
    )
    add(
        "--formula",
        action="store_true",
        help="print what forward saves for backward as a formula of samples and tokens",
    )
    add("--html", type=Path, metavar="OUT", help="write an HTML page to this file")
    add("--json", type=Path, metavar="OUT", help="write all numbers to this JSON file")
    parser.set_defaults(run=_plan, parser=parser)


def _plan(args: argparse.Namespace) -> int:
    try:
        batch, recipe, machine = BatchShape.parse(args.batch), _recipe(args), _cluster(args)
        if args.largest:
            return _print_largest(args, batch, recipe, machine)
        tables, traced = [], None
        if args.search:
            if args.model.rpartition(":")[0].endswith(".py"):
                raise ValueError(
                    f"--search: cannot vary the batch size of {args.model}: pass a config, not a "
                    "function"
                )

            def make_workload(size: int) -> Workload:
                return _workload(args, batch._replace(size=size))

            split = args.tp is None
            result = search(make_workload, batch.size, recipe, machine, _show_progress, split=split)
            print(f"{result}\n")
            best = result.best
            batch, recipe = batch._replace(size=best.microbatch), best.recipe
            tables, traced = [result.table()], best.traced
        workload = _workload(args, batch)
        shown = forecast(workload, recipe, machine, _show_progress, traced)
        if args.formula:
            shown = dataclasses.replace(shown, saved=_saved(args, batch, recipe, machine))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    _write("--json", args.json, shown.to_json)
    _write("--html", args.html, lambda: forecast_page(shown, tables))
    print(shown)
    return 0 if shown.fits else 1


def _workload(args: argparse.Namespace, batch: BatchShape) -> Workload:
    return _with_plan(args, find_workload(args.model, batch))


def _with_plan(args: argparse.Namespace, workload: Workload) -> Workload:
    if args.tp_plan is None:
        return workload
    if args.tp is None and not args.search:
        raise ValueError(f"--tp-plan {args.tp_plan}: set --tp as well")
    script, _, function = args.tp_plan.rpartition(":")
    return dataclasses.replace(workload, parallelize=load_function(script, function))


def _saved(args: argparse.Namespace, batch: BatchShape, recipe: Recipe, machine: Cluster) -> str:
    if not is_config(args.model):
        raise ValueError(
            f"--formula: cannot vary the batch size of {args.model}: pass a config, not a function"
        )
    if recipe.dtype == "fp8":
        raise ValueError("--formula with fp8: whether linears use fp8 depends on sizes; use bf16")

    def make_workload(num_samples: int) -> Workload:
        return _workload(args, batch._replace(size=num_samples))

    return formula_text(saved_bytes(make_workload, recipe, machine, _show_progress))


def _print_largest(
    args: argparse.Namespace, batch: BatchShape, recipe: Recipe, machine: Cluster
) -> int:
    if not is_config(args.model):
        raise ValueError(f"--largest: cannot scale {args.model}: pass a config, not a function")
    if args.json is not None:
        raise ValueError("--largest cannot write --json: drop one of the two options")
    config = find_config(args.model)

    def make_workload(factor: float, size: int) -> Workload:
        sized = scale_config(config, factor, recipe.tp)
        name = f"{sized.hidden_size} wide"
        return _with_plan(args, config_workload(sized, name, batch._replace(size=size)))

    result = largest(make_workload, recipe, machine, batch.size, _show_progress)
    title = f"graphshard plan --largest: {args.model} on {args.gpus} x {args.device}"
    _write("--html", args.html, lambda: result.page(title))
    print(result)
    return 0


def _write(option: str, path: Path | None, make: Callable[[], str]) -> None:
    if path is None:
        return
    text = make()  # outside of ``try``: an OSError raised here is not a failed write
    try:
        write_whole(path, text)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {option} {path}: {error}") from error


def _recipe(args: argparse.Namespace) -> Recipe:
    budget = None if args.budget is None else gigabytes("--budget", args.budget)
    return Recipe(
        args.strategy,
        args.dtype,
        args.optimizer,
        args.recompute,
        args.accumulate,
        budget,
        args.offload,
        1 if args.tp is None else args.tp,
    )


def _cluster(args: argparse.Namespace) -> Cluster:
    memory = None if args.memory is None else gigabytes("--memory", args.memory)
    return cluster(args.device, args.gpus, args.nodes, link=args.link, memory_gb=memory)


def gigabytes(name: str, text: str) -> float:
    """Parse a size such as "72GB" into GB (1e9 bytes).

    Raises:
        ValueError: ``text`` is not a positive size; the message names the option ``name``.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:GB)?", text, re.IGNORECASE)
    if match is None or not float(match[1]):
        raise ValueError(f'{name} {text}: must be a size in GB (1e9 bytes), as in "72GB"')
    return float(match[1])


def _fraction(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: must be a number from 0 to 1 or omitted; put MODEL before the options"
        ) from None


def _show_progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text} ..", end="", file=sys.stderr, flush=True)
