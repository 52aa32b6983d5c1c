from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.fsdp import MixedPrecisionPolicy

import graphshard
from graphshard.ops import float8_math
from graphshard.ops.float8_math import E4M3, E5M2, RECIPES, ROWWISE, TENSORWISE
from graphshard.ops.mx_math import MXFP8
from graphshard.ops.nodes import run


@pytest.mark.parametrize(
    ("fqn", "shape", "chosen"),
    [
        ("layers.0.q_proj.weight", (64, 48), True),
        ("weight", (16, 16), True),
        ("layers.0.q_proj.weight", (64, 40), False),
        ("layers.0.q_proj.weight", (8, 64), False),
        ("lm_head.weight", (64, 64), False),
        ("model.output.weight", (64, 64), False),
        ("layers.3.attention.output.weight", (64, 64), True),
        ("head_norm.weight", (64, 64), True),
    ],
)
def test_inner_linears_with_sizes_divisible_by_16_are_chosen(
    fqn: str, shape: tuple[int, int], chosen: bool
) -> None:
    param = torch.empty(shape, device="meta")
    assert bool(graphshard.Float8Policy().recipe_for([fqn], param)) == chosen
    assert not graphshard.Float8Policy().recipe_for([fqn, "lm_head.weight"], param)


@pytest.mark.parametrize(
    "param", [torch.empty(16), torch.empty(2, 16, 16), torch.ones(16, 16).int()]
)
def test_filter_is_called_only_for_floating_point_matrices(param: torch.Tensor) -> None:
    assert (
        graphshard.Float8Policy(filter_fn=lambda fqn, shape: True).recipe_for(["w"], param) is None
    )


def test_filter_gets_name_and_shape() -> None:
    policy = graphshard.Float8Policy(ROWWISE, lambda fqn, shape: (fqn, shape) == ("w", (3, 5)))
    assert policy.recipe_for(["w"], torch.empty(3, 5)) == ROWWISE
    assert policy.recipe_for(["v"], torch.empty(3, 5)) is None


FP16 = MixedPrecisionPolicy(param_dtype=torch.float16)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"fp8": "tensorwise"}, "fp8='tensorwise': must be a graphshard.Float8Policy"),
        (
            {"fp8": graphshard.Float8Policy(), "mp_policy": FP16},
            "fp8 with mp_policy.param_dtype=torch.float16",
        ),
        (
            {"overrides": {"*": {"fp8": graphshard.Float8Policy(), "mp_policy": FP16}}},
            r"overrides\['\*'\]: fp8 with mp_policy.param_dtype=torch.float16",
        ),
        ({"overrides": {"*": {"fp8": 8}}}, r"overrides\['\*'\]: fp8=8: must be"),
    ],
)
def test_backend_refuses_invalid_fp8_options(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        graphshard.backend(**arguments)


def test_policy_refuses_invalid_fields() -> None:
    with pytest.raises(ValueError, match=re.escape(f"must be one of {(*RECIPES, MXFP8)}")):
        graphshard.Float8Policy("blockwise")
    with pytest.raises(ValueError, match=r"fp8.filter_fn=3: must be a function"):
        graphshard.Float8Policy(filter_fn=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("value", [1e30, -1e30, float("inf"), 3.0])
def test_casts_saturate(dtype: torch.dtype, value: float) -> None:
    cast = float8_math.cast(run, torch.tensor([value]), torch.tensor(2.0), dtype, 0).float()
    largest = torch.finfo(dtype).max
    assert cast.item() == max(-largest, min(largest, 2 * value))


@pytest.mark.parametrize("recipe", RECIPES)
def test_nan_stays_nan(recipe: str) -> None:
    scaled = float8_math.quantized(run, torch.tensor([[1.0, float("nan")]]), E4M3, recipe, 1)
    assert scaled.values.float().isnan().any()


@given(st.floats(1e-20, 1e30), st.sampled_from([E4M3, E5M2]))
def test_amax_is_scaled_to_the_largest_fp8_value(amax: float, dtype: torch.dtype) -> None:
    x = torch.tensor([[amax, -amax / 3, 0.0]])
    scale = float8_math.scale_of(run, x.abs().amax(), dtype, TENSORWISE)
    largest = torch.finfo(dtype).max
    assert float(scale) == pytest.approx(largest / max(amax, 1e-12), rel=1e-6)
    values, inverse = float8_math.quantized(run, x, dtype, TENSORWISE, 1)
    if amax > 1e-11:
        assert values.float()[0, 0] == largest
        step = 2.0 ** -(3 if dtype is E4M3 else 2)
        assert torch.allclose(values.float() * inverse, x, rtol=step / 2 + 1e-5, atol=amax * 1e-5)
    by_row = float8_math.scale_of(run, x.abs().amax(1), dtype, ROWWISE)
    assert by_row.log2().item() == by_row.log2().round().item()
    assert scale / 2 < by_row <= scale
