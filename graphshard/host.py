"""Ops that copy shards between the host's memory and the device, beside compute: see ``graphshard.offload``.

    hosts ─► to_device ─► wait_tensor ─► all_gather ..      .. reduce_scatter ─► to_host ─► wait_tensor

Copies of one direction follow each other on a stream of their own, which begins them where compute is
when they are launched. Waiting for them holds up the stream of compute; or the host, if it is what reads them. On a
CPU they are plain copies.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from ._torch import register_work

PINNED, PAGEABLE = "pinned", "pageable"
"""The host's memory, as ops are told of it; "": the device's."""

_lib = torch.library.Library("graphshard", "FRAGMENT")
_tags = (torch.Tag.pt2_compliant_tag,)
_lib.define("to_device(Tensor[] hosts, Device device) -> Tensor[]", tags=_tags)
_lib.define("to_host(Tensor[] values, str host, bool is_read) -> Tensor[]", tags=_tags)
to_device = torch.ops.graphshard.to_device.default
to_host = torch.ops.graphshard.to_host.default


def kept_on_host(tensor: torch.Tensor, host: str) -> torch.Tensor:
    """``tensor`` there, now; itself where it is. One without data has no place."""
    if not host or tensor.is_meta:
        return tensor
    tensor = tensor.cpu()
    return tensor if host != PINNED or tensor.is_pinned() else tensor.pin_memory()


class _Copied(dist.Work):
    """Of copies that the device uses, or that free what they were made of.

    Args:
        held: not to be freed before the stream of compute is behind the copies.
    """

    def __init__(self, event: torch.Event, held: list[torch.Tensor]) -> None:
        super().__init__()
        self._event, self._held = event, held

    def wait(self, timeout: Any = None) -> bool:
        torch.accelerator.current_stream().wait_event(self._event)
        self._held.clear()
        return True


class _Arrived(_Copied):
    """Of copies that the host reads."""

    def wait(self, timeout: Any = None) -> bool:
        self._event.synchronize()
        return super().wait(timeout)


@functools.cache
def _stream(device: torch.device, to: str) -> torch.Stream:
    return torch.Stream(device=device)


@torch.library.impl(_lib, "to_device", "CompositeExplicitAutograd")
def _to_device(hosts: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    values = _to_device_fake(hosts, device)
    _copy(values, hosts, device, _Copied)
    return values


@torch.library.impl(_lib, "to_host", "CompositeExplicitAutograd")
def _to_host(values: list[torch.Tensor], host: str, is_read: bool) -> list[torch.Tensor]:
    pinned = host == PINNED and values[0].device.type != "cpu"
    hosts = [torch.empty_like(value, device="cpu", pin_memory=pinned) for value in values]
    _copy(hosts, values, values[0].device, _Arrived if is_read else _Copied)
    return hosts


def _copy(
    targets: list[torch.Tensor],
    sources: list[torch.Tensor],
    device: torch.device,
    work: type[_Copied],
) -> None:
    if device.type == "cpu":
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        return
    stream = _stream(device, targets[0].device.type)
    # What is on the device was allocated on the stream of compute: what used it before has to be done.
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
    event = stream.record_event()
    for target, source in zip(targets, sources, strict=True):
        register_work(target, work(event, [source]))


@torch.library.register_fake("graphshard::to_device", lib=_lib)
def _to_device_fake(hosts: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    return [host.new_empty(host.shape, device=device) for host in hosts]


@torch.library.register_fake("graphshard::to_host", lib=_lib)
def _to_host_fake(values: list[torch.Tensor], host: str, is_read: bool) -> list[torch.Tensor]:
    return [torch.empty_like(value, device="cpu") for value in values]
