"""The formula for the bytes saved for backward, compared with traces of several sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sympy
import torch

from graphshard.__main__ import main
from graphshard.forecast.cluster import cluster
from graphshard.forecast.derive import trace_step
from graphshard.forecast.formula import SAMPLES, TOKENS, formula_text, saved_bytes
from graphshard.forecast.recipe import Recipe
from graphshard.forecast.workload import BatchShape, Workload, find_workload

from .test_trace import Stack

_SIZES = "hidden_size=64,intermediate_size=128,num_attention_heads=4,num_key_value_heads=2"
_LLAMA = f"llama:{_SIZES},vocab_size=96,num_hidden_layers"


def _of_llama(num_samples: int, length: int = 32) -> Workload:
    return find_workload(f"{_LLAMA}=1", BatchShape(num_samples, length))


def _of_a_stack(num_samples: int, length: int = 32) -> Workload:
    ids = torch.zeros((num_samples, length), dtype=torch.int64)
    return Workload("stack", lambda n: (Stack(n or 6), (ids,)), ids.numel(), num_layers=6)


@pytest.mark.parametrize(
    ("workload", "recompute"),
    [(_of_llama, 0.0), (_of_a_stack, 1.0)],
    ids=["one layer", "recomputed layers"],
)
def test_formula_equals_bytes_of_static_traces(
    workload: Callable[..., Workload], recompute: float
) -> None:
    recipe, machine = Recipe(recompute=recompute), cluster("H100", gpus=2)
    formula = saved_bytes(workload, recipe, machine)
    larger = trace_step(workload(5, 64), recipe, machine)
    assert formula.subs({SAMPLES: 5, TOKENS: 64}) == larger.saved
    if not recompute:  # the formula omits RNG states, which recomputation restores
        forward = larger.graphs[0]
        saved = forward.problem.fixed_boundary_bytes[-1] - forward.input_bytes
        assert larger.saved == pytest.approx(saved, rel=1e-2)  # inputs and loss


def test_formula_text_starts_with_highest_degree() -> None:
    formula = 4 * SAMPLES * TOKENS**2 + sympy.Integer(92_100) * SAMPLES * TOKENS + 40
    text = "4 B x samples x tokens^2 + 92.1 KB x samples x tokens + 40 B"
    assert formula_text(formula) == text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "fp8"], "depends on sizes; use bf16"),
        (["--batch", "1"], "inputs are not tokens"),
    ],
    ids=["fp8", "images"],
)
def test_formula_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = f"{_LLAMA}=1" if "--dtype" in arguments else "vit:hidden_size=32,num_hidden_layers=1"
    assert main(["plan", model, "--batch", "1x32", *arguments, "--formula"]) == 2
    assert message in capsys.readouterr().err
