from __future__ import annotations

import dataclasses
import functools
import json
import operator
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from torch import fx

from graphshard.__main__ import main
from graphshard.kinds import GraphKind
from graphshard.show import Dump, diff, table
from graphshard.show.dump_folder import PAGE, DumpWriter, dump_paths
from tests.plan.dumps import as_kind, by_hand, dumps


@given(dumps())
def test_a_dump_survives_json(shown: Dump) -> None:
    again = Dump.from_json(shown.to_json())
    assert again == shown
    assert again.to_json() == shown.to_json()


def test_the_json_of_a_dump_is_readable() -> None:
    raw = json.loads(by_hand().to_json())
    assert raw["version"] == 4 and raw["compiled"] == "0/0"
    assert raw["hardware"]["name"] == "wire"
    assert raw["limits"] == {"cap": None, "in_flight": None, "peak": None, "reduce": "ring"}
    assert raw["plan"]["params"][0]["fqn"] == "up.weight"
    assert raw["predicted"] == {
        "total_us": 154.0,
        "compute_us": 74.0,
        "communication_us": 110.0,
        "exposed_us": 80.0,
        "slow_exposed_us": 135.0,
        "lost_us": pytest.approx(3 * 30 + 0.05 * (110 - 80)),
        "peak_bytes": 220,
        "in_flight_bytes": 40,
        "user_collectives_us": 0.0,
        "user_exposed_us": 0.0,
    }


def _with(**changes: Any) -> str:
    return json.dumps({**json.loads(by_hand().to_json()), **changes})


def _with_number(value: object, *keys: str | int) -> str:
    raw = json.loads(by_hand().to_json())
    outer = functools.reduce(operator.getitem, keys[:-1], raw)
    outer[keys[-1]] = value
    return json.dumps(raw)


# A bucket cannot be launched before this step.
IMPOSSIBLE = _with_number(10**9, "plan", "buckets", 0, "launch")

BAD = [
    ("", "Expecting value"),
    ("[1, 2]", "is not a dump from graphshard"),
    ('{"traceEvents": []}', "is not a dump from graphshard"),
    (by_hand().plan.to_json(), "is not a dump from graphshard"),
    (_with(version=7), "dump of version 7: this graphshard reads version 4"),
    (_with(plan={"version": 8}), "the plan has version 8"),
    (_with(plan={"version": 9}), "is not a dump from graphshard"),
    (_with(hardware={"version": 9}), "version 9: this graphshard reads version 5"),
    (_with(limits={"top": 3}), "is not a dump from graphshard"),
    (IMPOSSIBLE, "is not a dump from graphshard"),
    (_with_number(-1, "plan", "buckets", 0, "launch"), "is not a dump from graphshard"),
    (_with_number(0, "plan", "buckets", 0, "world"), "world=0, num_bytes=20: must be at least 1"),
    (_with_number(10**9, "plan", "problem", "transfers", 0, "param"), "is not a dump"),
]


@pytest.mark.parametrize(("text", "match"), BAD)
def test_files_that_are_not_dumps_are_refused(text: str, match: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=match) as caught:
        Dump.load(path)
    assert str(caught.value).startswith(str(path))


def test_write_plan_writes_json_trace_table_and_page(tmp_path: Path) -> None:
    shown = by_hand()
    DumpWriter(tmp_path, 3).write_plan(shown)
    assert Dump.load(tmp_path / "03-backward.json") == shown
    trace = json.loads((tmp_path / "03-backward.trace.json").read_text())
    assert len(trace["traceEvents"]) > 10
    assert (tmp_path / "03-backward.txt").read_text() == f"{table(shown)}\n"
    assert len(list(tmp_path.iterdir())) == 4 and (tmp_path / PAGE).exists()


def test_code_is_written_next_to_plan(tmp_path: Path) -> None:
    shown, writer = by_hand(), DumpWriter(tmp_path)
    graph = fx.Graph()
    graph.output(graph.call_function(abs, (graph.placeholder("x"),)))
    writer.write_code("backward", "before", graph)
    writer.write_plan(shown)
    code = (tmp_path / "00-backward.before.py").read_text()
    assert code.startswith("def forward(self, x):") and "abs" in code
    assert (tmp_path / "00-backward.txt").read_text() == f"{table(shown)}\n"


def test_nothing_is_written_without_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    writer = DumpWriter()
    writer.write_code("backward", "before", fx.Graph())
    writer.write_plan(by_hand())
    assert not list(tmp_path.iterdir())


def test_missing_folder_is_only_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="dump cannot be written: .*gone"):
        DumpWriter(tmp_path / "gone").write_plan(by_hand())


def test_page_that_cannot_be_written_is_only_a_warning(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('["measured: "]')
    with pytest.warns(UserWarning, match=r"index\.html cannot be written"):
        DumpWriter(tmp_path).write_plan(by_hand())


def test_code_that_cannot_be_encoded_is_only_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="dump cannot be written: .*surrogates not allowed"):
        DumpWriter(tmp_path).write_all({"forward.before.py": "\ud800"})


def test_reader_of_a_dump_never_sees_a_part_of_it(tmp_path: Path) -> None:
    path, shown = tmp_path / "00-backward.json", by_hand()
    DumpWriter(tmp_path).write_plan(shown)
    with path.open() as old:
        DumpWriter(tmp_path).write_plan(dataclasses.replace(shown, compiled="1/0"))
        assert Dump.from_json(old.read()) == shown
    assert Dump.load(path).compiled == "1/0"


def test_dumps_of_folder_are_in_order(tmp_path: Path) -> None:
    shown = by_hand()
    forward = as_kind(shown, GraphKind.FORWARD)
    for number in (100, 2):
        DumpWriter(tmp_path, number).write_plan(shown)
        DumpWriter(tmp_path, number).write_plan(forward)
    for other in ("step.json", "03-notes.json", "machine-a.json"):
        (tmp_path / other).write_text("{}")
    names = [path.name for path in dump_paths(tmp_path)]
    assert names == [
        "02-forward.json",
        "02-backward.json",
        "100-forward.json",
        "100-backward.json",
    ]


# --- the command line ----------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    shown = by_hand()
    last = dataclasses.replace(shown.plan.buckets[-1], launch=3)
    plan = dataclasses.replace(shown.plan, buckets=(*shown.plan.buckets[:-1], last))
    DumpWriter(tmp_path, 0).write_plan(shown)
    DumpWriter(tmp_path, 1).write_plan(dataclasses.replace(shown, plan=plan))
    return tmp_path / "00-backward.json", tmp_path / "01-backward.json"


def test_show_prints_tables(two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    tables = [table(Dump.load(path)) for path in two]
    assert main(["show", *map(str, two)]) == 0
    assert capsys.readouterr().out == f"{tables[0]}\n\n\n{tables[1]}\n"
    assert main(["show", str(two[0].parent)]) == 0
    assert capsys.readouterr().out == f"{tables[0]}\n\n\n{tables[1]}\n"


@pytest.mark.parametrize("text", [by_hand().to_json()[:99], IMPOSSIBLE])
def test_show_skips_files_of_folder_that_are_not_dumps(
    text: str, two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    tables = [table(Dump.load(path)) for path in two]
    two[1].write_text(text)
    assert main(["show", str(two[0].parent)]) == 0
    seen = capsys.readouterr()
    assert seen.out == f"{tables[0]}\n"
    assert seen.err.startswith(f"not shown: {two[1]}: ") and len(seen.err.splitlines()) == 1
    two[0].write_text("")
    with pytest.raises(SystemExit):
        main(["show", str(two[0].parent)])
    assert "no dump in this folder can be read" in capsys.readouterr().err


def test_diff_prints_differences(
    two: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = map(str, two)
    assert main(["diff", one, other]) == 1
    report = capsys.readouterr().out
    assert report == f"{diff(Dump.load(two[0]), Dump.load(two[1]))}\n"
    assert "launch before 2 step2 -> before end" in report
    page = tmp_path / "diff.html"
    assert main(["diff", one, other, "--html", str(page)]) == 1
    shown = page.read_text().replace("\\u003c", "<")
    assert '"compares":true' in shown and report.splitlines()[0] in shown
    capsys.readouterr()
    assert main(["diff", one, one]) == 0
    assert capsys.readouterr().out == "no difference\n"


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["show", "missing.json"], "missing.json: .*No such file"),
        (["show", "empty"], "empty: this folder has no dumps"),
        (["show", "00-backward.trace.json"], "trace.json: is not a dump"),
        (["diff", "00-backward.json", "old.json"], "old.json: dump of version 0"),
        (["diff", "00-backward.json", "missing.json"], "missing.json: .*No such file"),
        (["diff", "00-backward.json"], "required: B"),
        (["diff", "empty", "old.json"], r"empty is a folder: it has no dumps"),
        (["show"], "required: FILE"),
    ],
)
def test_show_and_diff_report_bad_arguments(
    arguments: list[str],
    match: str,
    two: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(two[0].parent)
    Path("empty").mkdir()
    Path("old.json").write_text(_with(version=0))
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    seen = capsys.readouterr()
    assert not seen.out
    assert re.search(match, seen.err)


def test_help_lists_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["calibrate", "--help"])
    assert caught.value.code == 0
    assert "--quick" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    listed = capsys.readouterr().out
    assert re.findall(r"^    (\w+)(?:  |$)", listed, re.M) == [
        "plan",
        "check",
        "demo",
        "show",
        "diff",
        "consolidate",
        "calibrate",
    ]
