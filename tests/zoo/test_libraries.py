"""Three SGD steps of models of peft, diffusers and sentence-transformers next to an unsharded copy:
losses, gradients and parameters agree."""

from __future__ import annotations

import pytest

from tests import ranks
from tests.numerics.compare import Twins

from .libraries import LIBRARIES

OFFLINE = {"HF_HUB_OFFLINE": "1"}


def _train(name: str, compiler: str) -> None:
    library = LIBRARIES[name]
    twins = Twins(library.build(), fullgraph=library.one_graph, compiler=compiler)
    twins.train(library.batch, loss=library.loss)


@pytest.mark.parametrize("name", LIBRARIES)
def test_trains_as_unsharded(name: str) -> None:
    ranks.run(2, _train, name, "aot_eager", env=OFFLINE)
