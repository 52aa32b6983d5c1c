"""Optimizers of torch, graphshard and transformers, compared with the table in `benchmarks`."""

from __future__ import annotations

import re

import pytest

from benchmarks.optimizer_table import CASES, SAME, Case, try_out
from tests import ranks

PACKAGES = ("torch", "graphshard", "transformers")
TRIED = [case for case in CASES if case.package in PACKAGES]


@pytest.mark.parametrize("case", TRIED, ids=[case.name for case in TRIED])
def test_optimizers_behave_as_the_table_says(case: Case) -> None:
    for outcome in ranks.run(2, try_out, case):
        if case.error is not None:
            assert outcome.error is not None and re.search(case.error, outcome.error)
            continue
        assert outcome.error is None
        assert outcome.difference <= case.tolerance
        assert outcome.state == SAME


def test_rows_have_unique_names_and_reasons() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(case.why for case in CASES if case.error or case.tolerance)
