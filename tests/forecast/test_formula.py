"""The formula for the bytes saved for backward, compared with traces of several sizes."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import sympy
import torch

from graphshard.__main__ import main
from graphshard.forecast import command
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


def test_formula_is_refused_with_fp8(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{_LLAMA}=1", "--dtype", "fp8", "--formula"]) == 2
    assert "--formula cannot be combined with --dtype fp8" in capsys.readouterr().err
    with pytest.raises(ValueError, match="use bf16 or float32"):  # as --search may choose it
        saved_bytes(_of_llama, Recipe(dtype="fp8"), cluster("H100", gpus=2))


def test_forecast_is_shown_if_there_is_no_formula(capsys: pytest.CaptureFixture[str]) -> None:
    shown = mock.MagicMock(as_dict=dict, fits=True)
    shown.__str__.return_value = "the forecast"
    model = "vit:hidden_size=32,num_hidden_layers=1"
    with mock.patch.object(command, "forecast", return_value=shown):
        assert main(["plan", model, "--batch", "1", "--formula"]) == 0
    out, err = capsys.readouterr()
    assert "the forecast" in out and "inputs are not tokens: omit --formula" in err
