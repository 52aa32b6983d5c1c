from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from graphshard.scripts import load_function, loss_of, unpack

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


@pytest.mark.parametrize(
    ("code", "choices"),
    [
        (
            "from torch import nn\nclass Net(nn.Module): ...\nmodel = Net()\ndef make(): ...",
            "choose one of Net, make",
        ),
        ("import torch", "it defines none"),
    ],
)
def test_error_for_unknown_function_lists_functions_of_script(
    tmp_path: Path, code: str, choices: str
) -> None:
    script = tmp_path / "one_step.py"
    script.write_text(code)
    with pytest.raises(ValueError, match=f"has no function 'mak': {choices}$"):
        load_function(str(script), "mak")


def test_script_runs_once_until_it_changes(tmp_path: Path) -> None:
    script = tmp_path / "script_of_model.py"
    script.write_text("class Net: ...\ndef make(): return Net()")
    made: Any = load_function(str(script), "make")()
    assert isinstance(made, load_function(str(script), "Net"))  # type: ignore[arg-type]
    script.write_text("def make(): return 3  # changed")
    assert load_function(str(script), "make")() == 3


def test_loss_of_a_dictionary_is_its_loss() -> None:
    logits, loss = (torch.ones(3, requires_grad=True).sum(0) for _ in range(2))
    assert loss_of({"logits": logits, "loss": loss}) is loss
