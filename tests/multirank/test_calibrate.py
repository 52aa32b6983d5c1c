from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from graphshard.__main__ import main
from graphshard.cost.devices import HARDWARE
from graphshard.cost.hardware import ALL_TO_ALL, COLLECTIVE_KINDS, Hardware, Interconnect
from graphshard.cost.measure import Effort, Sample, fit_interconnect, fit_rate, measure
from graphshard.cost.model import CostModel
from graphshard.kinds import TransferKind
from tests import ranks

CPU, BASE = torch.device("cpu"), HARDWARE["cpu"]
TINY = Effort(
    dtypes=("float32",),
    matmul_sizes=(4, 16),
    copy_bytes=(64, 4096),
    collective_bytes=(64, 4096),
    num_samples=2,
)


def _amounts(interconnect: Interconnect, kind: str) -> list[float]:
    return [amount for amount, _ in interconnect.bus[kind].achieved]


def test_without_ranks_links_keep_table_values() -> None:
    measured = measure(CPU, TINY)
    assert [amount for amount, _ in measured.flops["float32"].achieved] == [2 * 4**3, 2 * 16**3]
    assert [amount for amount, _ in measured.memory.achieved] == [2 * 64, 2 * 4096]
    assert measured.flops["bfloat16"] == BASE.flops["bfloat16"]
    assert (measured.intra, measured.inter) == (BASE.intra, BASE.inter)
    assert measured.special_per_s != BASE.special_per_s
    assert measured.launch_us != BASE.launch_us


def _write_from_ranks(path: Path) -> int:
    group = dist.group.WORLD
    with mock.patch.object(Effort, "for_device", return_value=TINY) as for_device:
        status = main(["calibrate", "--out", str(path), "--quick", "--sizes", "8192,128"])
    for_device.assert_called_once_with(CPU, quick=True)
    assert dist.group.WORLD is group  # calibrate must keep the caller's group
    return status


def test_ranks_measure_their_link_and_one_rank_writes(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text("of an earlier run")
    assert ranks.run(2, _write_from_ranks, path) == [0, 0]
    assert os.listdir(tmp_path) == [path.name]  # no scratch file remains
    written = Hardware.load(path)
    for kind in COLLECTIVE_KINDS:
        assert _amounts(written.intra, kind) == [128, 8192]
    assert written.intra.latency_us > 0
    assert written.inter == BASE.inter
    assert written.ranks_per_node == BASE.ranks_per_node


def _measure() -> Hardware:
    return measure(CPU, TINY)


def test_single_rank_nodes_measure_the_network() -> None:
    for measured in ranks.run(2, _measure, env={"LOCAL_WORLD_SIZE": "1"}):
        assert measured.ranks_per_node == 1
        assert measured.intra == BASE.intra  # a node of one rank has no internal link
        for kind in COLLECTIVE_KINDS:
            assert _amounts(measured.inter, kind) == [64, 4096]


def test_fitted_interconnect_predicts_measured_times() -> None:
    times = {
        TransferKind.ALL_GATHER: [100.0, 150.0, 900.0],
        TransferKind.REDUCE_SCATTER: [120.0, 300.0, 1700.0],
        TransferKind.ALL_REDUCE: [110.0, 200.0, 2000.0],
        ALL_TO_ALL: [105.0, 140.0, 850.0],
    }
    samples = {
        kind: [Sample(1000, small), Sample(10_000, medium), Sample(100_000, large)]
        for kind, (small, medium, large) in times.items()
    }
    for world in (2, 4):
        for ranks_per_node in (4, 1):
            link = fit_interconnect(samples, world, 0.0, ranks_per_node)
            cost_model = CostModel(
                dataclasses.replace(BASE, ranks_per_node=ranks_per_node, intra=link, inter=link)
            )
            for kind, of_kind in samples.items():
                for num_bytes, time_us in of_kind:
                    if kind == ALL_TO_ALL:
                        predicted = cost_model.exchange_us(num_bytes, world)
                    else:
                        predicted = cost_model.collective_us(kind, num_bytes, world)
                    assert predicted == pytest.approx(time_us, rel=0.03)


def test_rates_ignore_samples_slower_than_larger_ones() -> None:
    measured = fit_rate([Sample(10, 5.0), Sample(40, 4.0), Sample(20, 90.0), Sample(80, 8.0)])
    assert [measured.us(amount) for amount in (10, 20, 40, 80)] == pytest.approx([4, 4, 4, 8])


def test_rates_with_equal_times_are_accepted() -> None:
    # A rounding error makes the first time larger.
    measured = fit_rate([Sample(65536, 290.3), Sample(300000, 281.3)])
    assert measured.us(65536) == pytest.approx(281.3)


def test_rates_are_finite_for_samples_without_time() -> None:
    measured = fit_rate([Sample(10, -1.0), Sample(20, 0.0), Sample(40, 4.0)])
    assert 0 < measured.us(10) <= measured.us(20) < measured.us(40) == pytest.approx(4)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--out", "machine.json", "--sizes", "4k"], "'4k': must be sizes in bytes"),
        (["--out", "machine.json", "--sizes", "0"], "'0': must be sizes in bytes"),
        (["--out", "no such folder/machine.json"], "must be a file in a folder that exists"),
        ([], "--out"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["calibrate", *arguments])
    assert says in capsys.readouterr().err


def test_rates_are_printed_before_file_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "removed"
    folder.mkdir()

    def measure(*_: object) -> Hardware:
        folder.rmdir()
        return BASE

    arguments = ["calibrate", "--device", "cpu", "--out", str(folder / "machine.json")]
    with mock.patch("graphshard.cost.calibrate.measure", measure), pytest.raises(SystemExit):
        main(arguments)
    out, err = capsys.readouterr()
    assert "Tflop/s: float32" in out and "cannot write --out" in err


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_measured_sizes_are_increasing(device: str, quick: bool) -> None:
    effort = Effort.for_device(torch.device(device), quick=quick)
    for sizes in (effort.matmul_sizes, effort.copy_bytes, effort.collective_bytes):
        assert len(sizes) > 2 and list(sizes) == sorted(set(sizes))
