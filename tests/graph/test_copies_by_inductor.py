"""What is being copied to the host stays as it is until the copy is waited for, whatever memory
Inductor would write over."""

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
    """A copy that is made when somebody waits for it, as late as on a busy stream."""

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
    """Computes, while a tensor is copied, what could be written over it."""
    copied = torch.sin(x)
    (launched,) = torch.ops.graphshard.copy_to_host([copied], host_copy.PAGEABLE, False)
    result = copied * torch.mm(copied, x[:, :1])
    return torch.ops._c10d_functional.wait_tensor(launched), result


def _reused(x: Tensor) -> tuple[Tensor, Tensor]:
    """Computes, while a tensor is copied, what could be written into its memory."""
    large = x.repeat(4, 4)  # memory that is needed before, or Inductor would allocate rather
    copied = torch.sin(x) * torch.mm(large, large)[:64, :64]
    (launched,) = torch.ops.graphshard.copy_to_host([copied], host_copy.PAGEABLE, False)
    result = torch.mm(copied, x)
    result = torch.mm(result, x)
    return torch.ops._c10d_functional.wait_tensor(launched), result


def _permuted(x: Tensor) -> tuple[Tensor, Tensor]:
    """Copies what Inductor would lay out as ``heads``, and torch by rows."""
    heads = torch.mm(x, x).view(8, 8, 4, 16).transpose(1, 2)
    copied = torch.sin(heads.contiguous())
    (launched,) = torch.ops.graphshard.copy_to_host([copied], host_copy.PAGEABLE, False)
    return torch.ops._c10d_functional.wait_tensor(launched), copied.sum()


@pytest.mark.parametrize("fn", [_in_place, _reused, _permuted])
def test_nothing_is_written_over_what_is_being_copied(
    fn: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_copy, "_launch_copies", _launch_late)
    x = torch.randn(64, 64, dtype=torch.float64)
    compiled = torch.compile(fn, fullgraph=True, options=dict(KEEP_ORDER))  # type: ignore[call-overload]
    with torch.compiler.config.patch(force_disable_caches=True):  # they do not know our lowerings
        results = compiled(x)
    torch.testing.assert_close(results, fn(x))  # type: ignore[operator]
