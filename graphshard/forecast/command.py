"""Run the command ``graphshard plan``; ``arguments`` declares its arguments."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext

from .._torch.tensors import quiet_fake_tensors
from ..failures import describe_failure, format_failure
from ..files import write_output
from ..progress import show_line
from ..scripts import load_named_function
from ..show.page import Json, page
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
    """Run ``graphshard plan``; return 0 if the step fits, 1 if it does not, and 2 after an error.

    With ``--largest``, return 0 if any model or batch fits.
    """
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
    _check_options(args)
    batch = BatchShape.parse("1x4096" if args.batch is None else args.batch)
    recipe, machine = _recipe(args), _cluster(args)
    if args.largest:
        return _print_largest(args, batch, recipe, machine)

    def make_workload(size: int) -> Workload:
        return _checked(args, find_workload(args.model, batch._replace(size=size)))

    tables, found, traced = [], {}, None
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
        tables, found = [result.table()], result.as_dict()
        if not result.front():
            title = f"graphshard plan --search: {args.model} on {machine}"
            _write(args, {"fits": False, **found}, lambda: page(title, [], tables=tables))
            return 1
        best = result.best
        batch, recipe, traced = batch._replace(size=best.microbatch), best.recipe, best.traced
    shown = forecast(make_workload(batch.size), recipe, machine, show_line, traced)
    no_formula = ""
    if args.formula:
        try:
            formula = formula_text(saved_bytes(make_workload, recipe, machine, show_line))
            shown = dataclasses.replace(shown, saved=formula)
        except ValueError as error:  # the forecast and the search are valid without the formula
            no_formula = f"note   {error}"
    show_line("")
    print(shown)
    if no_formula:
        print(no_formula, file=sys.stderr)
    own_batch = None if is_function(args.model) else str(batch)
    numbers = {**shown.as_dict(), "batch": own_batch, **found}
    _write(args, numbers, lambda: forecast_page(shown, tables))
    return 0 if shown.fits else 1


def _check_options(args: argparse.Namespace) -> None:
    """Raise a ValueError if options cannot be combined with each other or with the model."""
    chosen = {
        "search": ("strategy", "recompute", "accumulate", "offload"),
        "largest": ("strategy",),
        "formula": (),
    }
    modes = [mode for mode in chosen if getattr(args, mode)]
    for mode in modes:
        for name in chosen[mode]:
            if getattr(args, name) is not None:
                raise ValueError(f"--{mode} chooses --{name} itself: drop one of the two")
        if args.ep > 1:
            raise ValueError(f"--ep cannot be combined with --{mode}: drop one of the two")
        if is_function(args.model):
            raise ValueError(
                f"--{mode} varies the batch or the model: pass a config instead of {args.model}"
            )
        if args.largest and mode != "largest":
            raise ValueError(f"--largest cannot be combined with --{mode}: drop one of the two")
    for name in ("json", "html"):
        if args.largest and getattr(args, name) is not None:
            raise ValueError(f"--largest cannot write --{name}: drop one of the two options")
    if args.formula and args.dtype == "fp8":
        raise ValueError("--formula cannot be combined with --dtype fp8: drop one of the two")
    if is_function(args.model) and args.batch is not None:
        raise ValueError(
            f"--batch {args.batch}: the inputs of {args.model} set the batch: drop --batch"
        )
    is_split = args.search if args.tp is None else args.tp > 1
    if args.tp_plan is not None and not is_split:
        raise ValueError(
            f"--tp-plan {args.tp_plan}: needs --tp of at least 2, or --search without --tp"
        )


def _write(args: argparse.Namespace, numbers: Json, make_page: Callable[[], str]) -> None:
    if args.json is not None:
        write_output("--json", args.json, json.dumps(numbers, indent=1))
    if args.html is not None:
        write_output("--html", args.html, make_page())


def _checked(args: argparse.Namespace, workload: Workload) -> Workload:
    given = None if args.batch is None else BatchShape.parse(args.batch)
    if given is not None and given.length and workload.unit == "samples":
        raise ValueError(
            f"--batch {args.batch}: {workload.name} takes images, which have no number of tokens: "
            f"pass only the number of samples, as in --batch {given.size}"
        )
    if args.tp_plan is None:
        return workload
    parallelize = load_named_function("--tp-plan", args.tp_plan)
    return dataclasses.replace(workload, parallelize=parallelize)


def _print_largest(
    args: argparse.Namespace, batch: BatchShape, recipe: Recipe, machine: Cluster
) -> int:
    config = find_config(args.model)

    def make_workload(factor: float, size: int) -> Workload:
        sized = scale_config(config, factor, recipe.tp)
        name = f"{sized.hidden_size} wide"
        return _checked(args, config_workload(sized, name, batch._replace(size=size)))

    result = largest(make_workload, recipe, machine, batch.size, show_line)
    show_line("")
    print(result)
    return 0 if result.fits else 1


def _recipe(args: argparse.Namespace) -> Recipe:
    given = {field.name: getattr(args, field.name, None) for field in dataclasses.fields(Recipe)}
    if args.budget is not None:
        given["budget_gb"] = gigabytes("--budget", args.budget)
    return Recipe(**{name: value for name, value in given.items() if value is not None})


def _cluster(args: argparse.Namespace) -> Cluster:
    memory = None if args.memory is None else gigabytes("--memory", args.memory)
    return cluster(args.device, args.gpus, args.nodes, link=args.link, memory_gb=memory)


def gigabytes(name: str, text: str) -> float:
    """Parse a size such as "72GB" into GB (1e9 bytes); errors name the option ``name``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:GB)?", text, re.IGNORECASE)
    if match is None or not float(match[1]):
        raise ValueError(f'{name} {text}: must be a positive size in GB (1e9 bytes), as in "72GB"')
    return float(match[1])
