from __future__ import annotations

import re
import sys
import tarfile
from pathlib import Path

import pytest

from benchmarks.common import FSDP2_BLOCKS, GRAPHSHARD
from benchmarks.gpu_trace import Kernel, split
from benchmarks.race import Racer, main

ROOT = Path(__file__).resolve().parents[2]
SMALL = "--device cpu --layers 1 --dim 64 --hidden 64 --vocab 64 --tokens 32 --steps 2 --rounds 1"


def _race(monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.chdir(ROOT)  # so that children can import benchmarks
    monkeypatch.setattr(sys, "argv", ["race", *SMALL.split(), "--links", "0.1,10", *options])
    main()


def test_race_runs_on_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _race(monkeypatch, "--variants", FSDP2_BLOCKS, GRAPHSHARD, "--out", str(tmp_path))
    out = capsys.readouterr().out
    rows = [line.split("|") for line in out.splitlines() if line.startswith("| ")]
    variants = {row[1].strip(): [cell.strip() for cell in row[2:-1]] for row in rows[1:]}
    assert list(variants) == [FSDP2_BLOCKS, GRAPHSHARD]
    for links, step_ms, *_, first_s in variants.values():
        assert links == "0.1 ms and 10 GB/s" and float(step_ms) > 0 and float(first_s) > 0
    last = out.rstrip().splitlines()[-1]
    said = re.fullmatch(r"race: (\S+) of FSDP2, compiled blocks over 0.1 ms and 10 GB/s", last)
    assert said and float(said[1]) == pytest.approx(float(variants[GRAPHSHARD][2]), abs=0.0006)
    with tarfile.open(tmp_path / "race.tar.gz") as packed:
        assert "race/graphshard-0.1-10/plan-0-forward.json" in packed.getnames()


def test_process_that_raises_ends_race(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="no answer"):
        _race(monkeypatch, "--variants", GRAPHSHARD, "--dim", "65")  # the head size must be even
    out, errors = capfd.readouterr()
    assert not out.rstrip().endswith("|") and "Traceback" in errors


@pytest.mark.parametrize(
    ("code", "timeout_s"),
    [
        pytest.param("", 60, id="dies"),
        pytest.param("print('a library')", 60, id="writes something else"),
        pytest.param("import time; time.sleep(99)", 0.5, id="hangs"),
    ],
)
def test_process_that_does_not_answer_ends_race(code: str, timeout_s: float) -> None:
    racer = Racer([sys.executable, "-c", code], timeout_s)
    with pytest.raises(SystemExit, match="no answer within"):
        racer.turn()
    racer.end()


def test_split_of_profile_into_parts_matches_hand_computation() -> None:
    # Two steps: stream 2 is a modelled link whose copy overlaps a kernel; stream 3 copies.
    kernels = [
        Kernel(0.0, 4000.0, 1, "gemm"),
        Kernel(3000.0, 1000.0, 2, "copy"),
        Kernel(4000.0, 3000.0, 2, "spin_kernel"),
        Kernel(5000.0, 1000.0, 1, "gemm"),
        Kernel(8000.0, 500.0, 3, "Memcpy DtoD"),
        Kernel(8500.0, 1500.0, 1, "adam"),
    ]
    expected = {"compute": 3.25, "exposed": 1.25, "idle": 0.5, "links": 2.0}
    assert split(kernels, 2) == pytest.approx(expected)
