from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from benchmarks.forecast_cpu import Case, Store, cases, machine_of
from benchmarks.forecast_report import Row, covers, error_interval, orders, paragraphs
from benchmarks.links import parse_wire
from graphshard.cost.devices import HARDWARE
from graphshard.cost.hardware import CALIBRATED, DATASHEET, Hardware
from graphshard.cost.model import CostModel
from graphshard.forecast.cluster import cluster
from graphshard.forecast.estimate import MEMORY, STEP_TIME
from graphshard.forecast.forecast import forecast_text
from graphshard.forecast.plan import forecast
from graphshard.forecast.recipe import Recipe
from graphshard.forecast.workload import module_workload
from graphshard.kinds import TransferKind

from .test_trace import trace_stack

ROW = Row("GPT", 2, "loopback", "float32", "zero3", 100.0, 5.0, 95.0, 1000, 0.1)
ROW = dataclasses.replace(
    ROW, predicted_ms=80.0, compute_ms=70.0, exposed_ms=6.0, optimizer_ms=4.0, predicted_bytes=990
)


RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "forecast_cpu.json"


def test_intervals_match_measured_steps() -> None:
    rows = Store.load(RESULTS).rows
    for shown, ratios in (
        (STEP_TIME[CALIBRATED], [row.time_ratio for row in rows]),
        (MEMORY, [row.memory_ratio for row in rows]),
    ):
        errors = error_interval(ratios)
        assert dataclasses.astuple(shown) == tuple(
            round(ratio, 2) for ratio in dataclasses.astuple(errors)
        )


def test_datasheet_interval_matches_published_steps() -> None:
    errors = STEP_TIME[DATASHEET]
    text = RESULTS.with_name("forecast.md").read_text()
    assert (
        f"steps took {errors.low:.2f} to {errors.high:.2f} times the modelled time, "
        f"{errors.likely:.2f} in the median"
    ) in text


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=80))
def test_an_interval_covers_nine_of_ten_and_the_median(ratios: list[float]) -> None:
    errors = error_interval(ratios)
    assert sum(covers(errors, ratio) for ratio in ratios) >= 0.9 * len(ratios)
    assert covers(errors, errors.likely)
    assert errors.low in ratios and errors.high in ratios


def test_forecast_interval_depends_on_source_of_rates() -> None:
    traced = trace_stack(1, Recipe())
    workload = module_workload(nn.Identity(), (torch.zeros(64),))
    for source in (DATASHEET, CALIBRATED):
        machine = cluster(dataclasses.replace(HARDWARE["H100"], source=source), 8)
        found = forecast(workload, Recipe(), machine, traced=traced)
        raw = json.loads(found.to_json())
        time, memory, errors = raw["time"], raw["memory"], STEP_TIME[source]
        parts = sum(time[f"{part}_us"] for part in ("compute", "exposed", "lost", "optimizer"))
        assert time["step_us"] == pytest.approx(errors.likely * parts)
        assert time["step_us"] == pytest.approx(parts + time["not_modelled_us"])
        assert time["low_us"] == pytest.approx(errors.low * parts)
        assert time["high_us"] == pytest.approx(errors.high * parts)
        assert memory["low"] == int(MEMORY.low * memory["allocated"])
        assert memory["high"] == int(MEMORY.high * memory["allocated"]) + memory["margin"]
        shown = f"{time['low_us'] / 1e3:,.1f} to {time['high_us'] / 1e3:,.1f} ms"
        assert shown in forecast_text(found)


def test_exposed_times_are_those_of_a_step() -> None:
    traced, machine = trace_stack(1, Recipe()), cluster("H100", 8)
    workload = module_workload(nn.Identity(), (torch.zeros(64),))
    once, four = (
        forecast(workload, Recipe(accumulate=number), machine, traced=traced).exposed
        for number in (1, 4)
    )
    assert once and [e.us for e in four] == pytest.approx([4 * e.us for e in once])


def test_hardware_files_state_device_type_and_source() -> None:
    measured = dataclasses.replace(HARDWARE["cpu"], source=CALIBRATED)
    assert Hardware.from_json(measured.to_json()) == measured
    assert measured.device_type == "cpu" and HARDWARE["H100"].device_type == "cuda"
    for field in ("device_type", "source"):
        raw = {**json.loads(measured.to_json()), field: "guess"}
        with pytest.raises(ValueError, match=f"{field}='guess'"):
            Hardware.from_json(json.dumps(raw))


def test_predicted_time_of_modelled_wire_equals_its_sleep() -> None:
    case = Case("GPT", 4, "4,1", "float32")
    for recipe in case.recipes:
        model = CostModel(machine_of(case, recipe, HARDWARE["cpu"]))
        group = recipe.ranks(4).shards
        for kind in (TransferKind.ALL_GATHER, TransferKind.ALL_REDUCE):
            seconds = parse_wire("4,1").seconds(10_000_000)
            assert model.collective_us(kind, 10_000_000, group) == pytest.approx(seconds * 1e6)


def test_measured_rows_are_stored(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    store = Store.load(path)
    store.calibrated[2] = HARDWARE["cpu"]
    store.rows.append(ROW)
    store.save()
    again = Store.load(path)
    assert again == store
    wanted = cases(["GPT"], [2], ["float32", "bf16"])
    assert [len(again.of_case(case)) for case in wanted] == [1, 0]


def test_order_of_strategies_counts_only_if_times_differ() -> None:
    def row(strategy: str, measured: float, predicted: float) -> Row:
        return dataclasses.replace(
            ROW, strategy=strategy, measured_ms=measured, predicted_ms=predicted
        )

    rows = [row("zero3", 100, 90), row("zero2", 105, 80), row("ddp", 120, 85)]
    assert orders(rows) == (1, 2)  # zero3 and zero2 are too close to be ordered
    table, summary, time, *_ = paragraphs([*rows, dataclasses.replace(rows[0], model="ViT")])
    assert "-10.0%" in table and "1 of 2 |" in summary
    assert time.startswith("Interval of step time: 1.11 to 1.41")
