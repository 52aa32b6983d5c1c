"""All models of the zoo train like DDP in float32, and one like FSDP2.

Losses and all gradients agree in each of three steps. Only two shallow models are compiled with
Inductor. Models compile to one graph; models with graph breaks warn once.
"""

from __future__ import annotations

import pytest

from tests.ranks import on_ranks

from .models import ZOO
from .training import compare

SHALLOW = ["llama-shallow", "mixtral"]  # one layer, since Inductor is slow
LIKE_FSDP2 = "llama"
LIKE_DDP = [name for name in ZOO if name not in (*SHALLOW, LIKE_FSDP2)]


@pytest.mark.parametrize("name", LIKE_DDP)
@on_ranks(2)
def test_zoo_model_trains_like_ddp(name: str) -> None:
    compare(name)


@pytest.mark.parametrize("name", SHALLOW)
@on_ranks(2)
def test_zoo_model_trains_like_ddp_with_inductor(name: str) -> None:
    compare(name, compiler="inductor")


@on_ranks(2)
def test_zoo_model_trains_like_fsdp2() -> None:
    compare(LIKE_FSDP2, against="fsdp2")
