from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from graphshard.kinds import GraphKind
from graphshard.show import Dump, dump_folder, profile
from graphshard.show.trace import MEASURED, PID, measured_runs, with_predictions
from tests.plan.dumps import as_kind, by_hand

Event = dict[str, Any]


def _dump(graph: GraphKind, compiled: str) -> Dump:
    return dataclasses.replace(as_kind(by_hand(), graph), compiled=compiled)


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: int) -> Event:
    args = {key.replace("_", " "): value for key, value in args.items()}
    return dict(ph="X", cat=cat, name=name, pid=9, tid=tid, ts=ts, dur=dur, args=args)


def op(name: str, ts: float, dur: float, tid: int = 1, **args: int) -> Event:
    return event("cpu_op", name, ts, dur, tid, **args)


NAME = {"ph": "M", "name": "process_name", "pid": 9, "tid": 0, "ts": 0, "args": {"name": "python"}}
STEP = [
    op("Torch-Compiled Region: 0/1", 1000.0, 500.0),
    op("CompiledFunction", 1010.0, 400.0, Sequence_number=7),
    op("Torch-Compiled Region: 1/0", 2000.0, 500.0),
    op("CompiledFunction", 2010.0, 400.0, Sequence_number=8),
    op("CompiledFunctionBackward", 3000.0, 500.0, tid=2, Sequence_number=8),
    op("CompiledFunctionBackward", 4000.0, 500.0, tid=2, Sequence_number=7),
]
DUMPS = [
    _dump(GraphKind.FORWARD, "0/1"),
    _dump(GraphKind.BACKWARD, "0/1"),
    _dump(GraphKind.BACKWARD, "1/0"),
]


def _starts(events: list[Event], dumps: list[Dump]) -> list[float]:
    """Return the start times of predicted runs; each starts with the gather of bucket 0."""
    merged = with_predictions({"traceEvents": [NAME, *events]}, dumps)["traceEvents"]
    predicted = [event for event in merged if event["pid"] == PID and event["ph"] == "X"]
    return [event["ts"] for event in predicted if event["args"].get("bucket") == 0]


def test_predictions_begin_where_their_graphs_ran() -> None:
    assert _starts(STEP, DUMPS) == [1000.0, 3000.0, 4000.0]
    assert _starts(STEP, [_dump(GraphKind.INFERENCE, "1/0")]) == [2000.0]
    assert _starts(list(reversed(STEP)), DUMPS) == [1000.0, 3000.0, 4000.0]


def test_graph_that_did_not_run_is_omitted() -> None:
    merged = with_predictions({"traceEvents": [NAME, *STEP]}, [_dump(GraphKind.FORWARD, "0/0")])
    assert all(event["pid"] != PID for event in merged["traceEvents"])


def test_predictions_do_not_overlap_each_other() -> None:
    twice = [op("Torch-Compiled Region: 0/1", ts, 50.0) for ts in (1000.0, 1100.0)]
    assert _starts(twice, DUMPS) == [1000.0, 1154.0]


def test_prediction_on_gpu_begins_at_first_kernel() -> None:
    device = [
        event("cuda_runtime", "cudaLaunchKernel", 900.0, 5.0, correlation=1),
        event("cuda_runtime", "cudaLaunchKernel", 1020.0, 5.0, correlation=2),
        event("cuda_driver", "cuLaunchKernel", 1030.0, 5.0, correlation=3),
        event("cuda_runtime", "cudaLaunchKernel", 1040.0, 5.0, tid=5, correlation=4),
        *(
            event("kernel", "mm", ts, 5.0, tid=7, correlation=c, stream=7)
            for c, ts in ((1, 1200.0), (2, 1900.0), (3, 1800.0), (4, 1300.0))
        ),
    ]
    nccl = [
        event("cuda_runtime", "cudaLaunchKernel", 1050.0, 5.0, correlation=5),
        event("kernel", "ncclDevKernel_AllGather", 1850.0, 90.0, tid=8, correlation=5, stream=8),
    ]
    assert _starts([*STEP[:2], *device], DUMPS) == [1800.0]
    (run,), *_ = measured_runs({"traceEvents": [*STEP[:2], *device, *nccl]}, DUMPS)
    assert (run.start_us, run.us) == (1800.0, 140.0)
    assert run.lanes == {"compute": [(0.0, 5.0), (100.0, 5.0)], "communication": [(50.0, 90.0)]}


def test_measured_and_predicted_are_separate_processes() -> None:
    merged = with_predictions({"traceEvents": [NAME, *STEP], "other": 3}, DUMPS)
    events = merged["traceEvents"]
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert named == {9: "measured: python", PID: "predicted on wire"}
    assert [e for e in events if e["pid"] == 9 and e["ph"] == "X"] == STEP
    assert merged["other"] == 3
    # Events without a stream do not count as measured.
    assert all("stream" not in e["args"] for e in events if e["pid"] == PID and e["ph"] == "X")
    arrows = [e["id"] for e in events if e["pid"] == PID and e["ph"] == "s"]
    assert len(arrows) == len(set(arrows)) == 9


@pytest.mark.parametrize("name", ["1-step.trace.json", "forward.json"])
def test_profiles_of_any_name_are_found(tmp_path: Path, name: str) -> None:
    for ours in ("1-forward.json", "1-forward.trace.json", "2-saving.json"):
        (tmp_path / ours).write_text(json.dumps({"ours": f"{MEASURED}: "}))
    (tmp_path / name).write_text(json.dumps({"theirs": f"{MEASURED}: "}))
    assert [*dump_folder._profiles(tmp_path)] == [{"theirs": f"{MEASURED}: "}]


def test_profile_in_missing_folder_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match=r"path: .* is not an existing folder"),
        profile(tmp_path / "a" / "b"),
    ):
        pass
    with (
        pytest.raises(ValueError, match=r"dump: .* is not an existing folder"),
        profile(tmp_path / "a.json", tmp_path / "b"),
    ):
        pass
