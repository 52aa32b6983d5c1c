"""Inductor does not overwrite the source of a host copy before the wait for the copy."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import graphshard  # noqa: F401 (the operators)
from graphshard._torch.distributed import register_work
from graphshard._torch.inductor import KEEP_ORDER
from graphshard.ops import host_copy


class _Late(dist.Work):
    """A copy that runs only in `wait`, as on a busy stream."""

    def __init__(self, target: Tensor, source: Tensor) -> None:
        super().__init__()
        self._target, self._source = target, source

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._target.copy_(self._source)
        return True


def _launch_late(
    targets: list[Tensor], sources: list[Tensor], device: torch.device, host_reads: bool
) -> None:
    for target, source in zip(targets, sources, strict=True):
        register_work(target, _Late(target, source))


def _in_place(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute, during a copy, a result that could overwrite the source in place."""
    copied = torch.sin(x)
    (launched,) = torch.ops.graphshard.copy_to_host([copied], host_copy.PAGEABLE, False)
    result = copied * torch.mm(copied, x[:, :1])
    return torch.ops._c10d_functional.wait_tensor(launched), result


def _reused(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute, during a copy, a result that could reuse the memory of the source."""
    large = x.repeat(4, 4)  # an earlier peak: otherwise, Inductor does not reuse memory
    copied = torch.sin(x) * torch.mm(large, large)[:64, :64]
    (launched,) = torch.ops.graphshard.copy_to_host([copied], host_copy.PAGEABLE, False)
    result = torch.mm(copied, x)
    result = torch.mm(result, x)
    return torch.ops._c10d_functional.wait_tensor(launched), result


def _permuted(x: Tensor) -> tuple[Tensor, Tensor]:
    """Copy a contiguous tensor to which Inductor would give the strides of ``heads``."""
    heads = torch.mm(x, x).view(8, 8, 4, 16).transpose(1, 2)
    copied = torch.sin(heads.contiguous())
    (launched,) = torch.ops.graphshard.copy_to_host([copied], host_copy.PAGEABLE, False)
    return torch.ops._c10d_functional.wait_tensor(launched), copied.sum()


@pytest.mark.parametrize("fn", [_in_place, _reused, _permuted])
def test_inductor_does_not_overwrite_source_of_copy(
    fn: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_copy, "_launch_copies", _launch_late)
    x = torch.randn(64, 64, dtype=torch.float64)
    compiled = torch.compile(fn, fullgraph=True, options=dict(KEEP_ORDER))  # type: ignore[call-overload]
    with torch.compiler.config.patch(force_disable_caches=True):  # cache keys ignore our lowerings
        results = compiled(x)
    torch.testing.assert_close(results, fn(x))  # type: ignore[operator]
