"""Checks of a pass pipeline: each pass must come after the passes that it requires."""

from __future__ import annotations

import pytest

from graphshard.passes import PIPELINE
from graphshard.passes.contract import Fact, Pass, Stage, ordered
from graphshard.passes.reshard import reshard
from tests.graph.builder import CONTEXT


def test_each_fact_is_provided_and_required() -> None:
    assert {fact for one in PIPELINE for fact in one.provides} == {*Fact}
    assert {fact for one in PIPELINE for fact in one.requires} == {*Fact}


def test_pass_before_its_requirements_is_refused() -> None:
    message = "pass reshard requires .*what backward gathers again.* in graphs for training"
    early = Pass(reshard, Stage.JOINT, requires=(Fact.GATHERS_KNOWN,))
    with pytest.raises(ValueError, match=message):
        ordered(early, *(one for one in PIPELINE if one.stage != Stage.TRACED))


def test_pass_after_later_stage_is_refused() -> None:
    message = (
        "pass reshard of stage joint comes after pass share_regions of the later stage lowered"
    )
    with pytest.raises(ValueError, match=message):
        ordered(*PIPELINE, Pass(reshard, Stage.JOINT))


def test_training_graph_gets_dtypes_from_joint_graph() -> None:
    final = [one.name for one in PIPELINE if one.stage == Stage.FINAL and one.runs(CONTEXT)]
    assert final == ["merge_markers", "normalize"]


def test_inference_graph_gets_no_facts_from_joint_graph() -> None:
    passes = [one for one in PIPELINE if one.stage != Stage.FINAL or one.name != "gather_float8"]
    with pytest.raises(ValueError, match=r"pass elide_single_rank_collectives requires .*dtype"):
        ordered(*passes)
