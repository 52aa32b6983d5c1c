"""Express the size of the tensors saved for backward as a formula in samples and tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import sympy

from .cluster import Cluster
from .derive import Progress, trace_step
from .recipe import Recipe
from .workload import MakeWorkload

SAMPLES, TOKENS = sympy.symbols("samples tokens", integer=True, positive=True)


def saved_bytes(
    make_workload: MakeWorkload,
    recipe: Recipe,
    cluster: Cluster,
    progress: Progress = lambda text: None,
) -> sympy.Expr:
    """Return a formula for the bytes that a rank saves for backward, for any microbatch size.

    The formula is for ZeRO-3 with one microbatch, whatever ``recipe`` sets, so it excludes
    parameters kept unsharded. A trace with symbolic sizes covers all microbatch sizes. If many
    layers repeat, models with fewer layers are traced, and the formula is extrapolated.

    Args:
        make_workload: function that takes a number of samples and returns a workload; samples have
            equal length.

    Returns:
        An expression in ``SAMPLES`` and ``TOKENS``, the length of a sample.

    Raises:
        ValueError: the recipe uses fp8, the inputs are not tokens, a graph is valid only for some
            sizes, or the trace with symbolic sizes fails.
    """
    if recipe.dtype == "fp8":
        raise ValueError(
            "--formula does not support fp8, because sizes decide whether a linear uses fp8: use "
            "bf16 or float32"
        )
    num_samples = 2  # torch specializes graphs on a size of 1
    workload = make_workload(num_samples)
    if workload.unit != "tokens":
        raise ValueError(f"{workload.name}: the inputs are not tokens: omit --formula")
    if workload.tokens == num_samples**2:  # ``trace`` distinguishes samples and tokens by size
        num_samples = 3
        workload = make_workload(num_samples)
    symbols = {num_samples: SAMPLES, workload.tokens // num_samples: TOKENS}
    recipe = dataclasses.replace(recipe, strategy="zero3", accumulate=1)
    workload = dataclasses.replace(workload, symbols=symbols)
    recipe.ranks(cluster.num_gpus)
    try:
        saved = sympy.expand(trace_step(workload, recipe, cluster, progress).saved)
    except Exception as error:  # torch may fail in any way with symbolic sizes
        raise ValueError(
            f"{workload.name}: omit --formula, because tracing with symbolic sizes failed: "
            f"{(str(error).strip() or type(error).__name__).splitlines()[0]}"
        ) from error
    if saved.free_symbols != {SAMPLES, TOKENS}:
        raise ValueError(
            f"{workload.name}: the bytes saved for backward cannot be written as a formula in "
            "samples and tokens, because the model's graph is valid only for some sizes: omit "
            "--formula"
        )
    return saved


def formula_text(num_bytes: sympy.Expr) -> str:
    """Return an expression of bytes as text, as in "92.1 KB x samples x tokens"."""
    terms = sorted(sympy.Add.make_args(num_bytes), key=lambda term: -sympy.total_degree(term))
    return " + ".join(map(_term_text, terms))


def _term_text(term: sympy.Expr) -> str:
    number, rest = term.as_coeff_Mul()
    return " x ".join([_size_text(float(number)), *_factor_texts(rest)])


def _factor_texts(product: sympy.Expr) -> Iterator[str]:
    for factor in sympy.Mul.make_args(product):
        if factor != 1:
            base, power = factor.as_base_exp()
            yield f"{base}" if power == 1 else f"{base}^{power}"


def _size_text(num_bytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes:g} B"
