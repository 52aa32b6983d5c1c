"""Ops that copy shards and activations between the host's memory and the device, beside compute: see
``graphshard.planning.host_copies``.

    hosts ─► to_device ─► wait ─► all_gather ..      .. reduce_scatter ─► to_host ─► wait ─► wait

Copies of one direction follow each other on a stream of their own, which begins them where compute is
when they are launched. The wait for a copy holds up the stream of compute, from where on the memory that was
copied is free; the second one, for what the host reads, holds up the host. On a CPU they are plain copies.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from .._torch.distributed import register_work

PINNED, PAGEABLE = "pinned", "pageable"
"""The host's memory, as ops are told of it; "": the device's."""

_lib = torch.library.Library("graphshard", "FRAGMENT")
_tags = (torch.Tag.pt2_compliant_tag,)
_lib.define("to_device(Tensor[] hosts, Device device) -> Tensor[]", tags=_tags)
_lib.define("to_host(Tensor[] values, str host) -> Tensor[]", tags=_tags)
to_device = torch.ops.graphshard.to_device.default
to_host = torch.ops.graphshard.to_host.default


def to_host_memory(tensor: torch.Tensor, host: str) -> torch.Tensor:
    """``tensor`` there, now; itself where it is. One without data has no place."""
    if not host or tensor.is_meta:
        return tensor
    tensor = tensor.cpu()
    return tensor if host != PINNED or tensor.is_pinned() else tensor.pin_memory()


class _Copied(dist.Work):
    """Of a copy: the stream of compute waits for it, and what it was made of may be freed. The next wait
    for the same tensor is the host's.

    Args:
        source: not to be freed before.
    """

    def __init__(self, target: torch.Tensor, source: torch.Tensor, event: torch.Event) -> None:
        super().__init__()
        self._target, self._source, self._event = target, source, event

    def wait(self, timeout: Any = None) -> bool:
        device = (self._target if self._source.device.type == "cpu" else self._source).device
        torch.accelerator.current_stream(device).wait_event(self._event)
        if self._target.device.type == "cpu":
            register_work(self._target, _Arrived(self._event))
        del self._target, self._source
        return True


class _Arrived(dist.Work):
    """Of a copy that the host is about to read."""

    def __init__(self, event: torch.Event) -> None:
        super().__init__()
        self._event = event

    def wait(self, timeout: Any = None) -> bool:
        self._event.synchronize()
        return True


@functools.cache
def _stream(device: torch.device, to: str) -> torch.Stream:
    return torch.Stream(device=device)


@torch.library.impl(_lib, "to_device", "CompositeExplicitAutograd")
def _to_device(hosts: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    values = _to_device_fake(hosts, device)
    _copy(values, hosts, device)
    return values


@torch.library.impl(_lib, "to_host", "CompositeExplicitAutograd")
def _to_host(values: list[torch.Tensor], host: str) -> list[torch.Tensor]:
    pinned = host == PINNED and values[0].device.type != "cpu"
    hosts = [torch.empty_like(value, device="cpu", pin_memory=pinned) for value in values]
    _copy(hosts, values, values[0].device)
    return hosts


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor], device: torch.device) -> None:
    if device.type == "cpu":
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        return
    stream = _stream(device, targets[0].device.type)
    # What is on the device was allocated on the stream of compute: what used it before has to be done.
    stream.wait_stream(torch.accelerator.current_stream(device))
    with stream:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
    event = stream.record_event()
    for target, source in zip(targets, sources, strict=True):
        register_work(target, _Copied(target, source, event))


@torch.library.register_fake("graphshard::to_device", lib=_lib)
def _to_device_fake(hosts: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    return [torch.empty_like(host, device=device) for host in hosts]


@torch.library.register_fake("graphshard::to_host", lib=_lib)
def _to_host_fake(values: list[torch.Tensor], host: str) -> list[torch.Tensor]:
    return [torch.empty_like(value, device="cpu") for value in values]
