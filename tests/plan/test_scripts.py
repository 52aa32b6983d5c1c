from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from graphshard.scripts import unpack

MODEL, TOKENS = nn.Linear(2, 2), torch.zeros(1, 2)


@pytest.mark.parametrize("inputs", [(TOKENS,), [TOKENS], {"input": TOKENS}])
def test_model_and_inputs_are_unpacked(inputs: Any) -> None:
    assert unpack("f", (MODEL, inputs)) == (MODEL, inputs, {})
    assert unpack("f", (MODEL, inputs, {"dump": "x"})) == (MODEL, inputs, {"dump": "x"})


@pytest.mark.parametrize(
    ("returned", "error"),
    [
        (MODEL, "f returned Linear: must be (model, inputs)"),
        ([MODEL, (TOKENS,)], "f returned list: must be (model, inputs)"),
        ((TOKENS, (TOKENS,)), "f returned Tensor as the model: must be a torch.nn.Module"),
        ((torch.compile(MODEL), (TOKENS,)), "a compiled model: remove its torch.compile"),
        ((MODEL, TOKENS), "f returned Tensor as the inputs: must be a tuple"),
        ((MODEL, (TOKENS,), "bf16"), "f returned str as the options: must be a dictionary"),
    ],
)
def test_other_results_are_refused(returned: object, error: str) -> None:
    with pytest.raises(ValueError, match=re.escape(error)):
        unpack("f", returned)
