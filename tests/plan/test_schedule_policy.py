from __future__ import annotations

from typing import Any

import pytest

from graphshard import SchedulePolicy

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"overlap": 1}, r"overlap=1: must be True or False"),
    ({"regions": 1}, r"regions=1: must be True, False or"),
    ({"bucket_cap_mb": 0}, r"bucket_cap_mb=0: must be a positive, finite number"),
    ({"bucket_cap_mb": "large"}, r"bucket_cap_mb='large': must be a positive, finite number"),
    ({"max_in_flight_gb": -1.0}, r"max_in_flight_gb=-1\.0: must be a positive, finite number"),
    ({"memory_budget_gb": True}, r"memory_budget_gb=True: must be a positive, finite number"),
    ({"memory_budget_gb": float("inf")}, r"memory_budget_gb=inf: must be a positive, finite"),
    ({"activation_memory_budget": 1.5}, r"=1\.5: must be a number from 0 \(recompute all"),
    ({"activation_memory_budget": "half"}, r"='half': must be a number from 0"),
    (
        {"overlap": False, "memory_budget_gb": 1},
        r"limit overlapping collectives; set schedule\.overlap=True",
    ),
    ({"auto": "yes"}, r"schedule\.auto='yes': must be True or False"),
    ({"overlap": False, "auto": True}, r"auto=True with overlap=False: .* or omit auto"),
    ({"node_cost": 3.0}, r"node_cost=3\.0: must be a function of an fx.Node"),
    ({"hardware": "abacus"}, r"abacus"),
]


@pytest.mark.parametrize(("fields", "match"), WRONG)
def test_invalid_fields_are_refused(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        SchedulePolicy(**fields)


def test_valid_fields_are_accepted() -> None:
    for budget in (None, 0, 0.5, 1):
        SchedulePolicy(activation_memory_budget=budget, bucket_cap_mb=1, memory_budget_gb=0.5)
