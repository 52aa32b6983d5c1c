from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphshard.check.gpus import GPUS
from graphshard.cost.devices import (
    DEFAULT,
    HARDWARE,
    find_hardware,
    find_hardware_or_default,
    with_network,
)
from graphshard.cost.hardware import COLLECTIVE_KINDS, Hardware, Interconnect, Rate
from graphshard.kinds import TransferKind

_positive = st.floats(1e-3, 1e15)


@st.composite
def rates(draw: st.DrawFn) -> Rate:
    amounts = sorted(draw(st.sets(st.integers(1, 1 << 40), min_size=1, max_size=5)))
    times = sorted(draw(st.lists(st.floats(1e-3, 1e6), min_size=5, max_size=5)))
    points = tuple((a, a / t * (1 - 1e-9) ** i) for i, (a, t) in enumerate(zip(amounts, times)))
    return Rate(draw(_positive), points)


links = st.builds(
    Interconnect,
    latency_us=st.floats(0, 1e4),
    hop_us=st.floats(0, 1e4),
    buffer_us=st.floats(0, 1e4),
    bus=st.fixed_dictionaries(dict.fromkeys(COLLECTIVE_KINDS, rates())),
)
machines = st.builds(
    Hardware,
    name=st.text(max_size=9),
    flops=st.fixed_dictionaries({"float32": rates()}, optional={"bfloat16": rates()}),
    memory=rates(),
    host=rates(),
    special_per_s=_positive,
    launch_us=st.floats(0, 1e3),
    issue_us=st.floats(0, 1e3),
    contention=st.floats(0, 1),
    ranks_per_node=st.integers(1, 1000),
    intra=links,
    inter=links,
)


def test_rate_interpolates_time_between_its_points() -> None:
    rate = Rate(1e6, ((10, 0.1), (20, 0.1), (40, 0.16)))  # 100, 200 and 250 us
    expected = {0: 0, 5: 50, 10: 100, 15: 150, 20: 200, 30: 225, 40: 250, 80: 500}
    assert {amount: rate.us(amount) for amount in expected} == pytest.approx(expected)


@given(rates(), st.floats(0, 1e13), st.floats(0, 1e13))
def test_a_larger_amount_never_takes_less_time(rate: Rate, one: float, other: float) -> None:
    less, more = sorted((one, other))
    assert 0 <= rate.us(less) <= rate.us(more) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("peak", "achieved", "says"),
    [
        (1.0, (), "at least one"),
        (0.0, ((1, 1.0),), "peak=0.0"),
        (math.nan, ((1, 1.0),), "peak=nan"),
        (1.0, ((1, 0.0),), "achieved=0.0"),
        (1.0, ((2, 1.0), (1, 1.0)), "amounts must grow"),
        (1.0, ((1, 0.1), (2, 0.3)), "must not take less time"),
    ],
)
def test_invalid_rates_are_refused(peak: float, achieved: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Rate(peak, achieved)


@pytest.mark.parametrize(
    ("device", "entry"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("AMD Instinct MI300X", "MI300X"),
        ("cpu", "cpu"),
        *((name, name) for name in HARDWARE),
        *((properties.name, name) for name, properties in GPUS.items()),
    ],
)
def test_device_names_find_their_entry(device: str, entry: str) -> None:
    assert find_hardware(device).name == entry
    assert find_hardware_or_default(device) is HARDWARE[entry]


@pytest.mark.parametrize(
    "device",
    [
        "Tesla T4",
        "NVIDIA H100 PCIe MIG 1g.10gb",
        "NVIDIA H200 NVL",
        "NVIDIA GH200 480GB",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A10",
        "",
    ],
)
def test_unknown_devices_are_refused_or_use_default(device: str) -> None:
    with pytest.raises(ValueError, match=r"H100.*calibrate") as refused:
        find_hardware(device)
    assert repr(device) in str(refused.value)
    warning = rf"{re.escape(repr(device))} .* Rates that .* are those of {DEFAULT}"
    with pytest.warns(UserWarning, match=warning):
        assert find_hardware_or_default(device) is HARDWARE[DEFAULT]


@pytest.mark.parametrize("name", [name for name in HARDWARE if name != "cpu"])
def test_no_entry_exceeds_its_datasheet(name: str) -> None:
    hardware = HARDWARE[name]
    rates = [*hardware.flops.values(), hardware.memory]
    assert all(0.4 < fraction <= 1 for rate in rates for _, fraction in rate.achieved[-1:])
    assert all(rate.achieved[-1][1] <= 1 for rate in hardware.inter.bus.values())
    for kind in COLLECTIVE_KINDS:  # links between nodes are slower than links within one
        for num_bytes in (1 << 10, 1 << 24, 1 << 30):
            assert hardware.inter.bus[kind].us(num_bytes) >= hardware.intra.bus[kind].us(num_bytes)


def _between_nodes(hardware: Hardware, kind: str) -> float:
    return 1e15 / hardware.inter.bus[kind].us(1e15) * 1e6


def test_network_cards_of_node_add_up_to_limit_of_nvlink() -> None:
    slow, fast = (with_network(HARDWARE["H100"], gbit) for gbit in (100, 3200))
    assert _between_nodes(slow, TransferKind.ALL_GATHER) == pytest.approx(
        8 * 100e9 / 8 * 0.94 * 0.99
    )
    assert _between_nodes(fast, TransferKind.ALL_GATHER) == pytest.approx(370e9 * 0.97 * 0.99)
    assert _between_nodes(fast, TransferKind.ALL_REDUCE) == pytest.approx(480e9 * 0.97 * 0.99)
    assert fast.intra == HARDWARE["H100"].intra
    assert fast.inter.latency_us == HARDWARE["H100"].inter.latency_us


def test_unlisted_dtypes_run_at_float32_rate() -> None:
    a100 = HARDWARE["A100-80GB"]
    assert a100.flops_of("bfloat16") is a100.flops["bfloat16"]
    assert a100.flops_of("float64") is a100.flops["float32"]


@given(machines)
def test_hardware_survives_json(hardware: Hardware) -> None:
    assert Hardware.from_json(hardware.to_json()) == hardware


@pytest.mark.parametrize("name", HARDWARE)
def test_the_table_survives_json(name: str) -> None:
    assert Hardware.from_json(HARDWARE[name].to_json()) == HARDWARE[name]


def _changed(path: str, value: Any) -> str:
    """Return the JSON of an entry with one field replaced, or removed if ``value`` is ``...``."""
    raw = json.loads(HARDWARE["H100"].to_json())
    *parents, last = path.split(".")
    fields = raw
    for parent in parents:
        fields = fields[parent]
    fields[last] = value
    if value is ...:
        del fields[last]
    return json.dumps(raw)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("version", 1),
        ("name", 3),
        ("name", ...),
        ("launch_us", "fast"),
        ("launch_us", -1),
        ("launch_us", True),
        ("ranks_per_node", 0),
        ("ranks_per_node", 1.5),
        ("special_per_s", float("nan")),
        ("flops", []),
        ("flops.float32", ...),
        ("flops.bfloat16", 1e12),
        ("flops.bfloat16.peak", 0),
        ("memory.achieved", 0.9),
        ("memory.achieved", [[1.0]]),
        ("memory.achieved", [["1", 0.9]]),
        ("memory.achieved", [[2, 0.9], [1, 0.9]]),
        ("intra.bus.all_reduce", ...),
        ("intra.bus.all_reduce.peak", None),
        ("inter.hop_us", ...),
        ("inter.latency_us", -3),
    ],
)
def test_errors_in_file_name_file_and_field(path: str, value: Any, tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text(_changed(path, value))
    with pytest.raises(ValueError, match=r"machine\.json: ") as refused:
        Hardware.load(file)
    for part in path.split("."):
        assert part in str(refused.value)


@pytest.mark.parametrize("content", [b"\x80PK\x03\x04", "{}".encode("utf-16")])
def test_file_that_is_not_text_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"machine\.json: is not UTF-8 text: pass a file that"):
        Hardware.load(file)


@pytest.mark.parametrize("path", ["name", "memory.peak", "inter.buffer_us"])
def test_missing_field_is_an_error(path: str) -> None:
    with pytest.raises(ValueError, match=f"^machine: {path} is missing: add it, or run"):
        Hardware.from_json(_changed(path, ...), "machine")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null"])
def test_text_that_is_not_a_json_object_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^machine\.json: "):
        Hardware.from_json(text, "machine.json")
