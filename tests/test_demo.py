from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from graphshard.__main__ import main


def test_demo_prints_comparison_and_writes_page(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "graphshard", "demo", "--steps", "4"]
    page = tmp_path / "demo.html"
    command += ["--compiler", "aot_eager", "--html", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    for text in (
        "loss, first step",
        "bytes/s on the modelled wire",
        "Why?",
        "all_gather",
        "Words",
        "Next",
    ):
        assert text in done.stdout
    # With aot_eager, all three first losses are bitwise equal.
    (losses,) = (line for line in done.stdout.splitlines() if line.startswith("loss, first step"))
    assert len(set(losses.split()[3:])) == 1
    report = done.stdout.split("\n\n")[1:]
    assert "2.0 times as much" in report[0]
    real, modelled = re.findall(r"Speed on .*: ([0-9.]+) times FSDP2", report[1])
    assert float(real) > 0 and float(modelled) > 0
    assert "training step" in page.read_text()


def test_unwritable_page_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "--html", "nowhere/demo.html"])
    assert "'nowhere/demo.html': must be a file in a folder that" in capsys.readouterr().err
