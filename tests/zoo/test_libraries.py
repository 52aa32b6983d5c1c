"""Models of peft, diffusers and sentence-transformers train like unsharded copies."""

from __future__ import annotations

import pytest

from tests import ranks
from tests.numerics.compare import Twins

from .libraries import LIBRARIES

OFFLINE = {"HF_HUB_OFFLINE": "1"}


def _train(name: str) -> None:
    library = LIBRARIES[name]
    twins = Twins(library.build(), fullgraph=library.one_graph)
    twins.train(library.batch, loss=library.loss)


@pytest.mark.parametrize("name", LIBRARIES)
def test_library_model_trains_like_unsharded_copy(name: str) -> None:
    ranks.run(2, _train, name, env=OFFLINE)
