"""The page of a dump folder: numbers match the dumps, and names cannot inject HTML.

One test opens a page in Chromium, if installed.
"""

from __future__ import annotations

import dataclasses
import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from graphshard.__main__ import main
from graphshard.kinds import GraphKind, TransferKind
from graphshard.planning.memory_budget import ScheduleLimits
from graphshard.planning.simulate import COMMUNICATION, COMPUTE
from graphshard.show import Dump
from graphshard.show.dump_folder import PAGE, DumpWriter, folder_page
from graphshard.show.page import TEMPLATE, Json, graph_data, page, steps_data
from graphshard.show.step import Phase, graph_names, training_step
from graphshard.show.table import exposed_reason, is_notable
from graphshard.show.trace import PID
from tests.plan.dumps import as_kind, by_hand, dump, dumps
from tests.plan.problems import problem, reduction
from tests.plan.test_show_measured import NAME, STEP, event, op

EVIL = "</script><img src=x onerror=\"console.error('ran')\"><!--data-->.weight"


def _data(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


# --- the data ------------------------------------------------------------------------------------


@given(dumps())
def test_the_numbers_of_the_page_are_those_of_the_dump(shown: Dump) -> None:
    data, plan = graph_data(shown, ""), shown.plan
    assert json.loads(json.dumps(data, allow_nan=False))
    totals = dataclasses.asdict(shown.totals)
    totals["exposed_us"] += totals["user_exposed_us"]
    assert data["predicted"] == {**totals, "host_copies_us": data["predicted"]["host_copies_us"]}
    assert [b["exposed_us"] for b in data["buckets"]] == pytest.approx(
        shown.timeline.exposed_us, abs=1e-3
    )
    for i, (bucket, found) in enumerate(zip(plan.buckets, data["buckets"], strict=True)):
        names = [data["params"][k]["name"] for k in found["params"]]
        assert names == shown.param_names(bucket)
        notable = is_notable(shown.timeline.exposed_us[i])
        assert found["reason"] == (exposed_reason(shown, i) if notable else None)
    areas = [area["bytes"] for area in data["memory"]["areas"]]
    assert all(num_bytes >= 0 for area in areas for num_bytes in area)
    alive = tuple(map(sum, zip(*areas)))
    assert alive == shown.timeline.alive_bytes


def test_graph_data_matches_hand_computation() -> None:
    shown = dataclasses.replace(by_hand(), limits=ScheduleLimits(peak=300, in_flight=50))
    plan = dataclasses.replace(shown.plan, kept=(1,), reasons=((0, "travels as float32"),))
    data = graph_data(dataclasses.replace(shown, plan=plan), "backward", "00-backward")
    assert (data["name"], data["kind"]) == ("backward", "backward")
    assert data["steps"]["module"] == ["up", "down", "down"]
    assert data["lanes"] == [COMPUTE, COMMUNICATION] and data["ranks"] == [4]
    assert data["kept"] == [1] and data["reasons"] == [(0, "travels as float32")]
    assert data["steps"]["start_us"] == [30.0, 60.0, 104.0]
    assert data["memory"]["until_us"] == [50.0, 100.0, 114.0]
    limits = [(limit["name"], limit["bytes"]) for limit in data["memory"]["limits"]]
    assert limits == [("memory budget", 300), ("in-flight limit", 50)]
    assert [param["used"] for param in data["params"]] == [0, 1, None, None]
    last = data["buckets"][2]
    assert last == {
        "kind": "reduce_scatter",
        "label": "norm.weight .. norm.bias (2)",
        "params": [2, 3],
        "bytes": 40,
        "wire_dtypes": ["float32"],
        "ranks": 4,
        "lane": "communication",
        "start_us": 104.0,
        "us": 50.0,
        "copy_in": (100.0, 4.0),
        "copy_out": (154.0, 0.0),
        "exposed_us": 40.0,
        "reason": "compute after it is too short",
        "launch": 2,
        "wait": 3,
    }


def _local(shown: Dump) -> Dump:
    buckets = tuple(bucket for bucket in shown.plan.buckets if not bucket.kind.is_reduction)
    return as_kind(shown, GraphKind.BACKWARD, buckets=buckets)


def test_step_counts_runs_of_graphs_in_profile() -> None:
    last = by_hand()
    forward = as_kind(last, GraphKind.FORWARD, buckets=_local(last).plan.buckets)
    local = [dataclasses.replace(one, compiled="0/1") for one in (forward, _local(last))]
    dumps = [*local, forward, last, as_kind(last, GraphKind.INFERENCE)]
    names = graph_names(dumps)
    assert names == [
        "forward, no_sync",
        "backward, no_sync",
        "forward",
        "backward",
        "evaluation",
    ]
    took = {"median_us": 100.0, "us": 100.0, "lanes": {}}
    runs = [{**took, "runs": count} for count in (6, 6, 2, 2, 1)]
    graphs = [graph_data(*parts) for parts in zip(dumps, names, names, runs)]
    step, evaluation = steps_data(dumps, graphs, note="note")
    parts = [(phase["name"], phase["count"]) for phase in step["phases"]]
    assert parts == [*zip(names, (3, 3, 1, 1)), ("optimizer (a fused AdamW)", 1)]
    totals = [dump.totals.total_us for dump in dumps]
    optimizer_us = step["phases"][-1]["us"]
    expected = 3 * sum(totals[:2]) + sum(totals[2:4]) + optimizer_us
    assert step["predicted"]["total_us"] == pytest.approx(expected)
    assert optimizer_us > 0 and step["predicted"]["peak_bytes"] == 220
    assert (step["measured_us"], evaluation["measured_us"]) == (800.0, 100.0)
    assert steps_data([], []) == []


def test_optimizer_time_excludes_maxima_of_fp8_weights() -> None:
    maxima = dataclasses.replace(reduction(0, 8, 1, 1), kind=TransferKind.ALL_REDUCE_MAX)
    assert dump(problem([1.0], [maxima]), []).optimizer_us() == 0
    assert dump(problem([1.0], [reduction(0, 8, 1, 1)]), []).optimizer_us() > 0


def test_step_contains_only_newest_graph_of_same_parameters() -> None:
    last = by_hand()
    first = dataclasses.replace(last, compiled="0/0")
    again = dataclasses.replace(last, compiled="0/1")
    assert graph_names([first, again]) == ["backward (0/0)", "backward (0/1)"]
    assert training_step([first, again]) == [Phase(1)]


def test_backward_graphs_run_in_reverse_order() -> None:
    shown = by_hand()
    renamed = [dataclasses.replace(param, fqn=f"2.{param.fqn}") for param in shown.plan.params]
    other = as_kind(shown, GraphKind.BACKWARD, params=tuple(renamed))
    dumps = [
        dataclasses.replace(as_kind(dump, kind), compiled=str(i))
        for i, dump in enumerate((shown, other))
        for kind in (GraphKind.FORWARD, GraphKind.BACKWARD)
    ]
    assert [phase.graph for phase in training_step(dumps)] == [0, 2, 3, 1]


# --- the file ------------------------------------------------------------------------------------


def test_names_are_escaped() -> None:
    shown = by_hand()
    params = (dataclasses.replace(shown.plan.params[0], fqn=EVIL), *shown.plan.params[1:])
    graph = graph_data(as_kind(shown, GraphKind.BACKWARD, params=params), "")
    text = page(EVIL, [graph])
    data = _data(text)
    assert (data["title"], data["graphs"]) == (EVIL, [json.loads(json.dumps(graph))])
    assert text.count("</script>") == TEMPLATE.read_text().count("</script>")
    assert "<img" not in text
    assert f"<title>{html.escape(EVIL)}</title>" in text


def test_page_needs_no_other_files() -> None:
    text = page("x", [graph_data(by_hand(), "")])
    assert not re.search(r"https?://|//\w+\.|src=|<link|@import|url\(|fetch\(|import ", text)
    assert "default-src 'none'" in text


def test_page_of_folder_shows_all_graphs(tmp_path: Path) -> None:
    shown = by_hand()
    DumpWriter(tmp_path, 0).write_plan(as_kind(shown, GraphKind.FORWARD))
    DumpWriter(tmp_path, 0).write_plan(shown)
    (tmp_path / "notes.json").write_text("{}")
    (tmp_path / "01-forward.json").write_text("half of a")
    DumpWriter(tmp_path, 2).write_plan(as_kind(shown, GraphKind.INFERENCE))
    data = _data((tmp_path / PAGE).read_text())
    assert data["title"] == f"graphshard: {tmp_path.name}"
    names = ["00-forward", "00-backward", "02-inference"]
    assert [graph["source"] for graph in data["graphs"]] == names
    (note,) = data["notes"]
    assert note.startswith(f"not shown: {tmp_path / '01-forward.json'}: ")


def test_page_has_measured_and_predicted_times(tmp_path: Path) -> None:
    shown = dataclasses.replace(by_hand(), compiled="1/0")
    DumpWriter(tmp_path).write_plan(as_kind(shown, GraphKind.FORWARD))
    DumpWriter(tmp_path).write_plan(shown)
    measured = {**NAME, "args": {"name": "measured: python"}}
    predicted = {**STEP[0], "pid": PID}
    again = [{**event, "ts": event["ts"] + 9000.0, "dur": 300.0} for event in STEP[2:4]]
    waits = op("_c10d_functional::wait_tensor", 11100.0, 40.0)
    gathers = event("user_annotation", "gloo:all_gather", 11050.0, 90.0, tid=3)
    events = [measured, predicted, *STEP, *again, waits, gathers]
    (tmp_path / "step.trace.json").write_text(json.dumps({"traceEvents": events}))
    other = {"traceEvents": [measured, *STEP], "distributedInfo": {"rank": 1}}
    (tmp_path / "step.rank1.trace.json").write_text(json.dumps(other))
    (tmp_path / "half.json").write_text('{"traceEvents": [{"name": "measured: ')
    forward, backward = _data(folder_page(tmp_path))["graphs"]
    busy = [[0.0, 100.0], [140.0, 160.0]], [[50.0, 90.0]]
    assert forward["measured"] == {
        **{"runs": 2, "median_us": 400.0, "us": 500.0},
        "lanes": {
            "0": dict(zip(("compute", "communication"), busy)),
            "1": {"compute": [[0.0, 500.0]]},
        },
    }
    assert backward["measured"]["runs"] == 1 and backward["measured"]["median_us"] == 500.0


def test_show_html_writes_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    DumpWriter(tmp_path).write_plan(by_hand())
    out, text = tmp_path / "out.html", (tmp_path / PAGE).read_text()
    assert main(["show", str(tmp_path), "--html", str(out)]) == 0
    assert out.read_text() == text and capsys.readouterr().out == ""
    for wrong, message in (
        (
            [tmp_path, "--html", tmp_path / "gone" / "out.html"],
            "cannot write --html .*No such file",
        ),
        (
            [tmp_path / "00-backward.json", "--html", out],
            "--html: pass exactly one folder of dumps",
        ),
    ):
        with pytest.raises(SystemExit) as caught:
            main(["show", *map(str, wrong)])
        assert caught.value.code == 2
        assert re.search(message, capsys.readouterr().err)


# --- in a browser --------------------------------------------------------------------------------

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), "")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--enable-logging=stderr", "--virtual-time-budget=3000", "--window-size=1200,900"),
    "--dump-dom",
)

LOOK = """
<pre id="seen"></pre>
<script>
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const texts = (selector, within) => all(selector, within).map(node => node.textContent);
const shown = within => all("tbody tr", within).filter(row => !row.hidden);
const press = (node, key) => node.dispatchEvent(new KeyboardEvent("keydown", {key}));
const type = text => { field.value = text; field.dispatchEvent(new Event("input")); };
setTimeout(() => {
  charts.forEach(chart => chart.paint());  // on a busy machine, no frame may have been drawn yet
  const [top, section, other] = all("section"), canvas = section.querySelector("canvas"), seen = {};
  const tip = section.querySelector(".tip");
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  seen.title = document.title;
  seen.images = all("img").length;
  seen.sums = top.querySelector(".sums").textContent;
  seen.first = top.querySelector("canvas").getBoundingClientRect().top;
  press(top.querySelector("canvas"), "ArrowRight");
  seen.layers = top.querySelector(".tip").textContent;
  seen.graphs = all("#graphs tbody tr").map(row => texts("th, td", row));
  seen.headers = texts(".buckets thead th", section);
  seen.rows = shown(section.querySelector(".buckets")).map(row => texts("td", row));
  seen.lists = texts("details", section);
  seen.red = pixels.reduce((n, _, i) =>
    n + (i % 4 === 0 && pixels[i] > 180 && pixels[i + 1] < 60 && pixels[i + 2] < 80), 0);
  type("NORM.");
  seen.found = shown(section.querySelector(".buckets")).map(row => texts("td", row)[2]);
  seen.count = document.getElementById("found").textContent;
  type("*.bias");
  seen.pattern = document.getElementById("found").textContent;
  type("");
  all(".buckets thead button", section)[6].click();
  seen.sorted = shown(section.querySelector(".buckets")).map(row => texts("td", row)[0]);
  seen.sort = all(".buckets thead th", section)[6].getAttribute("aria-sort");
  press(canvas, "ArrowRight");
  ["ArrowDown", "ArrowDown"].forEach(key => press(canvas, key));
  seen.measured = tip.textContent;
  ["ArrowDown", "ArrowLeft"].forEach(key => press(canvas, key));
  seen.focused = tip.textContent;
  const box = canvas.getBoundingClientRect(), at = views[0].chart.x(130);
  const [clientX, clientY] = [box.left + at, box.top + 151];
  canvas.dispatchEvent(new PointerEvent("pointermove", {clientX, clientY}));
  seen.hovered = tip.textContent;
  other.querySelector(".pick").click();
  seen.picked = other.querySelector(".tip").textContent;
  seen.chosen = texts("tr.chosen td:first-child", other);
  console.warn("looked");
  document.getElementById("seen").textContent = JSON.stringify(seen);
}, 500);
</script>
"""


def _step_label(graph: Json, step: int) -> str:
    steps = graph["steps"]
    return f"{steps['module'][step]} ({steps['name'][step]})" if step < len(steps["us"]) else "end"


def _look(path: Path, profile: Path) -> tuple[dict[str, Any], list[str]]:
    """Return what a page with the script ``LOOK`` shows in the browser, and its console output."""
    command = [BROWSER, *FLAGS, f"--user-data-dir={profile}", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    seen = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.S)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert seen and seen[1], f"{console}\n{done.stdout[-2000:]}"
    found: dict[str, Any] = json.loads(html.unescape(seen[1]))
    return found, console


@pytest.mark.skipif(not BROWSER, reason="needs Chromium (Debian: apt-get install chromium)")
def test_page_works_in_browser(tmp_path: Path) -> None:
    shown = by_hand()
    params = (dataclasses.replace(shown.plan.params[0], fqn=EVIL), *shown.plan.params[1:])
    reasons = ((1, "travels as float32: used as bfloat16 and float32"),)
    evil = as_kind(shown, GraphKind.BACKWARD, params=params, kept=(0,), reasons=reasons)
    lanes = {"compute": [(0.0, 80.0)], "communication": [(100.0, 50.0)]}
    measured = {"runs": 3, "median_us": 1234.0, "us": 500.0, "lanes": {"0": lanes}}
    graphs = [
        graph_data(evil, "backward", "00-backward", measured),
        graph_data(as_kind(shown, GraphKind.INFERENCE), "evaluation (0/0)"),
        graph_data(as_kind(dump(problem([], []), []), GraphKind.INFERENCE), "evaluation (0/1)"),
    ]
    steps = steps_data([evil], graphs[:1], optimizer_us=46.0, note="as measured")
    path = tmp_path / "page.html"
    text = page(EVIL, graphs, steps)
    path.write_text(text.replace("</body>", f"{LOOK}</body>"))
    seen, console = _look(path, tmp_path / "profile")
    assert len(console) == 1, console
    (looked,) = console  # the message of LOOK; errors would also be here
    assert '"looked"' in looked
    assert seen["images"] == 0 and seen["title"] == EVIL
    assert "training step 0.200 ms" in seen["sums"] and "0.080 ms exposed (40.0 %)" in seen["sums"]
    assert "optimizer 0.046 ms" in seen["sums"] and "as measured" in seen["sums"]
    assert seen["first"] < 300 and "0.020 ms of compute, from 0.030 to 0.050" in seen["layers"]
    numbers = ["0.074", "0.110", "0.080", "0.092", "220 B", "40 B", "3"]
    assert seen["graphs"] == [
        ["backward", "1", "0.154", "1.234", *numbers],
        ["evaluation (0/0)", "–", "0.154", "–", *numbers],
        ["evaluation (0/1)", "–", "0.000", "–", *["0.000"] * 4, "0 B", "0 B", "0"],
    ]
    assert seen["headers"][3:7] == ["B", "wire dtype", "predicted ms", "exposed ms"]
    assert seen["rows"] == [
        [
            *(str(i), b["kind"], b["label"], str(b["bytes"]), "float32"),
            *(f"{b['us'] / 1e3:.3f}", f"{b['exposed_us'] / 1e3:.3f}", b["reason"]),
            *(_step_label(graphs[0], b["launch"]), _step_label(graphs[0], b["wait"])),
        ]
        for i, b in enumerate(graphs[0]["buckets"])
    ]
    assert seen["lists"] == [
        f"Parameters kept unsharded for backward (1){EVIL}",
        f"Reasons for a larger wire dtype (1)down.weight {reasons[0][1]}",
    ]
    assert seen["red"] > 1000
    assert seen["found"] == ["norm.weight .. norm.bias (2)norm.weight, norm.bias"]
    assert (seen["count"], seen["pattern"]) == ("2 of 6 buckets", "2 of 6 buckets")
    assert (seen["sorted"], seen["sort"]) == (["2", "0", "1"], "descending")
    assert seen["measured"] == "busy in the profilemeasured0.080 ms, from 0.000 ms"
    assert seen["focused"].startswith("bucket 0: all_gather") and EVIL in seen["focused"]
    assert seen["hovered"].startswith("bucket 2: reduce_scatterparametersnorm.weight, norm.bias")
    assert "0.040 ms, because: compute after it is too short" in seen["hovered"]
    assert seen["picked"].startswith("bucket 0: all_gatherparametersup.weight")
    assert seen["chosen"] == ["0"]
