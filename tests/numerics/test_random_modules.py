"""Whatever a model is nested, shared, tied, frozen and sized like: forward, backward and a step of
SGD agree with the unsharded model."""

from __future__ import annotations

import torch
from hypothesis import Phase, given, settings

from tests import ranks
from tests.numerics.compare import Twins
from tests.numerics.random_modules import Description, RandomModel, descriptions


def _train(description: Description) -> None:
    torch._dynamo.reset()
    twins = Twins(RandomModel(description))
    twins.train(RandomModel.batch, steps=2)


# A failing example costs new processes: descriptions are short enough without shrinking.
@settings(max_examples=20, phases=[Phase.generate])
@given(descriptions)
def test_a_random_model_trains_as_its_unsharded_copy(description: Description) -> None:
    ranks.run(2, _train, description)
