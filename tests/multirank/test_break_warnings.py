from __future__ import annotations

from typing import Any

from tests import ranks
from tests.models import MLP
from tests.numerics.compare import Twins, graphshard_warnings
from tests.numerics.test_breaks import DisabledFirst, Loop, Middle
from tests.ranks import on_ranks


def _warning_of(kind: Any) -> str:
    with graphshard_warnings() as warned:
        Twins(kind(), fullgraph=False).train(kind.batch, steps=1)
    return warned[0]


def test_break_warning_names_file_and_line() -> None:
    line = Middle.forward.__code__.co_firstlineno + 2
    for text in ranks.run(2, _warning_of, Middle):
        assert f"test_breaks.py:{line}" in text
    for text in ranks.run(2, _warning_of, DisabledFirst):
        assert "test_breaks.py" in text or "Linear" in text


@on_ranks(2)
def test_each_model_with_breaks_warns_once() -> None:
    with graphshard_warnings() as warned:
        for kind in (Middle, Loop):
            Twins(kind(), fullgraph=False).train(kind.batch, steps=2)
    assert [text.split()[1] for text in warned] == ["Middle", "Loop"]


@on_ranks(2)
def test_model_without_breaks_does_not_warn() -> None:
    with graphshard_warnings() as warned:
        Twins(MLP()).train(MLP.batch, steps=2)
    assert not warned
