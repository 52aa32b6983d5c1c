"""Models of the zoo train like DDP in float32; one is compared with FSDP2 instead.

Losses and all gradients agree in each of three steps. Only one shallow model is compiled with
Inductor. Models compile to one graph; models with graph breaks warn once.
"""

from __future__ import annotations

import pytest

from tests.ranks import on_ranks

from .models import ZOO
from .training import compare

WITH_INDUCTOR = "llama-shallow"  # one layer, since Inductor is slow
LIKE_FSDP2 = "llama"
LIKE_DDP = [name for name in ZOO if name not in (WITH_INDUCTOR, LIKE_FSDP2)]


@pytest.mark.parametrize("name", LIKE_DDP)
@on_ranks(2)
def test_zoo_model_trains_like_ddp(name: str) -> None:
    compare(name)


@on_ranks(2)
def test_zoo_model_trains_like_ddp_with_inductor() -> None:
    compare(WITH_INDUCTOR, compiler="inductor")


@on_ranks(2)
def test_zoo_model_trains_like_fsdp2() -> None:
    compare(LIKE_FSDP2, against="fsdp2")
