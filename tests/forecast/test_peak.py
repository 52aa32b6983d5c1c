"""Forecast memory equals the memory of compiled code on a simulated GPU (``check``)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.llama import Llama, LlamaSizes
from graphshard.check import process
from graphshard.check.analysis import peak_bytes_of_step
from graphshard.check.step import record_steps
from graphshard.forecast.cluster import cluster
from graphshard.forecast.planned_step import plan_step
from graphshard.forecast.recipe import Recipe
from graphshard.forecast.trace import trace
from graphshard.options.schedule_policy import SchedulePolicy

from .test_trace import HARDWARE

RECIPES = (
    Recipe(optimizer="momentum"),  # the optimizer of ``check``
    Recipe("hsdp:4", optimizer="momentum", offload=True),
)


def _make() -> tuple[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    ids = torch.zeros((2, 512), dtype=torch.int64)
    return Llama(LlamaSizes(256, 2, 4, 2, 896, recompute=False, vocab=2048)), (ids, ids)


def peaks(recorder: Any) -> list[int]:
    found = []
    for recipe in RECIPES:
        options = {**recipe.options(), "schedule": SchedulePolicy(hardware="H100")}
        recording = record_steps(recorder, _make, recipe.ranks(8), options)
        found.append(peak_bytes_of_step(recording.actions))
    return found


@pytest.mark.skipif(bool(process.obstacle()), reason=process.obstacle())
def test_forecast_peaks_match_compiled_code() -> None:
    measured = process.call("tests.forecast.test_peak:peaks", "H100")
    for recipe, needed in zip(RECIPES, measured, strict=True):
        traced = trace(_make, recipe.ranks(8), HARDWARE, recipe.traced_options())
        memory = plan_step(traced, recipe, cluster("H100", 8)).memory
        assert memory.allocated == pytest.approx(needed, rel=0.02), recipe
