from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from graphshard import SchedulePolicy
from graphshard.cost.devices import HARDWARE

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


def test_hardware_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rates.json").write_text(HARDWARE["H100"].to_json(), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    policy = SchedulePolicy(hardware="rates.json")
    monkeypatch.chdir("/")
    (tmp_path / "rates.json").unlink()
    for same in (policy, dataclasses.replace(policy, memory_budget_gb=1)):
        assert same.cost_model(torch.device("cuda")).hardware == HARDWARE["H100"]
    assert "hardware='rates.json'" in repr(policy)
    for name in ("H200", "auto"):
        other = dataclasses.replace(policy, hardware=name).cost_model(torch.device("cpu"))
        assert other.hardware == HARDWARE["cpu" if name == "auto" else name]


@pytest.mark.parametrize(
    ("device", "ranks", "in_node", "nodes", "crosses"),
    [
        ("H100", 8, 4, 2, True),
        ("H100", 8, 8, 1, False),
        ("H100", 4, 1, 2, False),  # one rank next to a node with three
        ("GB200", 8, 4, 2, False),  # in one rack
    ],
)
def test_links_follow_the_nodes_of_torchrun(
    device: str,
    ranks: int,
    in_node: int,
    nodes: int,
    crosses: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": in_node, "GROUP_WORLD_SIZE": nodes}
    for name, size in sizes.items():
        monkeypatch.setenv(name, str(size))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: f"NVIDIA {device}")
    assert SchedulePolicy().cost_model(torch.device("cuda")).crosses_nodes(ranks) == crosses
