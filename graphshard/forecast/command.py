"""Run the command ``graphshard plan``; ``arguments`` declares its arguments."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from contextlib import nullcontext

from .._torch.tensors import quiet_fake_tensors
from ..failures import describe_failure, format_failure
from ..files import write_output
from ..progress import show_line
from ..scripts import load_named_function
from .cluster import Cluster, cluster
from .formula import formula_text, saved_bytes
from .largest import largest
from .plan import forecast
from .recipe import Recipe
from .report import forecast_page
from .search import search
from .workload import (
    BatchShape,
    Workload,
    config_workload,
    find_config,
    find_workload,
    is_function,
    scale_config,
)


def plan(args: argparse.Namespace) -> int:
    """Run the command; return 0 if the step fits, 1 if it does not, and 2 after an error."""
    try:
        with nullcontext() if args.verbose else quiet_fake_tensors():
            return _plan(args)
    except argparse.ArgumentTypeError:
        raise
    except (Exception, SystemExit) as error:  # a user's function may raise anything
        failure = format_failure(describe_failure(error), args.verbose)
    finally:
        show_line("")
    print(failure, file=sys.stderr)
    return 2


def _plan(args: argparse.Namespace) -> int:
    batch, recipe, machine = BatchShape.parse(args.batch), _recipe(args), _cluster(args)
    _check_chosen(args)
    modes = [name for name in ("search", "largest", "formula") if getattr(args, name)]
    if modes and recipe.ep > 1:
        raise ValueError(f"--ep cannot be combined with --{modes[0]}: drop one of the two")
    if args.largest:
        return _print_largest(args, batch, recipe, machine)
    if modes and is_function(args.model):
        raise ValueError(
            f"--{modes[0]}: cannot vary the batch size of {args.model}: pass a config, not a "
            "function"
        )

    def make_workload(size: int) -> Workload:
        return _with_plan(args, find_workload(args.model, batch._replace(size=size)))

    tables, traced, saved = [], None, ""
    if args.search:
        dtypes = None if args.dtype is None else (args.dtype,)
        result = search(
            make_workload,
            batch.size,
            recipe,
            machine,
            show_line,
            split=args.tp is None,
            dtypes=dtypes,
        )
        show_line("")
        print(f"{result}\n")
        if not result.front():
            return 1
        best = result.best
        batch, recipe = batch._replace(size=best.microbatch), best.recipe
        tables, traced = [result.table()], best.traced
    workload = make_workload(batch.size)
    if args.formula:
        saved = formula_text(saved_bytes(make_workload, recipe, machine, show_line))
    shown = forecast(workload, recipe, machine, show_line, traced)
    shown = dataclasses.replace(shown, saved=saved)
    if args.json is not None:
        write_output("--json", args.json, shown.to_json())
    if args.html is not None:
        write_output("--html", args.html, forecast_page(shown, tables))
    show_line("")
    print(shown)
    return 0 if shown.fits else 1


def _check_chosen(args: argparse.Namespace) -> None:
    chosen = {
        "search": ("strategy", "recompute", "accumulate", "offload"),
        "largest": ("strategy",),
    }
    for mode, names in chosen.items():
        for name in names if getattr(args, mode) else ():
            if getattr(args, name) != getattr(Recipe(), name):
                raise ValueError(f"--{mode} chooses --{name} itself: drop one of the two")


def _with_plan(args: argparse.Namespace, workload: Workload) -> Workload:
    if args.tp_plan is None:
        return workload
    if args.tp is None and not args.search:
        raise ValueError(f"--tp-plan {args.tp_plan}: set --tp or --search as well")
    parallelize = load_named_function("--tp-plan", args.tp_plan)
    return dataclasses.replace(workload, parallelize=parallelize)


def _print_largest(
    args: argparse.Namespace, batch: BatchShape, recipe: Recipe, machine: Cluster
) -> int:
    if is_function(args.model):
        raise ValueError(f"--largest: cannot scale {args.model}: pass a config, not a function")
    if args.json is not None:
        raise ValueError("--largest cannot write --json: drop one of the two options")
    for option in ("search", "formula"):
        if getattr(args, option):
            raise ValueError(f"--largest cannot be combined with --{option}: drop one of the two")
    config = find_config(args.model)

    def make_workload(factor: float, size: int) -> Workload:
        sized = scale_config(config, factor, recipe.tp)
        name = f"{sized.hidden_size} wide"
        return _with_plan(args, config_workload(sized, name, batch._replace(size=size)))

    result = largest(make_workload, recipe, machine, batch.size, show_line)
    title = f"graphshard plan --largest: {args.model} on {args.gpus} x {args.device}"
    if args.html is not None:
        write_output("--html", args.html, result.page(title))
    show_line("")
    print(result)
    return 0 if result.fits else 1


def _recipe(args: argparse.Namespace) -> Recipe:
    budget = None if args.budget is None else gigabytes("--budget", args.budget)
    return Recipe(
        args.strategy,
        args.dtype or "bf16",
        args.optimizer,
        args.recompute,
        args.accumulate,
        budget,
        args.offload,
        1 if args.tp is None else args.tp,
        args.reduce,
        args.ep,
    )


def _cluster(args: argparse.Namespace) -> Cluster:
    memory = None if args.memory is None else gigabytes("--memory", args.memory)
    return cluster(args.device, args.gpus, args.nodes, link=args.link, memory_gb=memory)


def gigabytes(name: str, text: str) -> float:
    """Parse a size such as "72GB" into GB (1e9 bytes); errors name the option ``name``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:GB)?", text, re.IGNORECASE)
    if match is None or not float(match[1]):
        raise ValueError(f'{name} {text}: must be a positive size in GB (1e9 bytes), as in "72GB"')
    return float(match[1])
