"""Copy between host memory and the device while compute runs.

    host tensors ─► copy_to_device ─► wait ─► all_gather ..
                                              .. reduce_scatter ─► copy_to_host ─► wait ─► wait

Each direction has a stream, on which copies run in order; a copy starts once the compute stream has
reached its launch. The first wait for a copy makes the compute stream wait, and frees the source. A
second wait, for copies that the host reads, makes the host wait. If the device is a CPU, copies are
complete when their launch returns. ``graphshard.planning.offload`` plans copies.
"""

from __future__ import annotations

import functools
from datetime import timedelta

import torch
import torch.distributed as dist

from .._torch.distributed import register_work
from .._torch.inductor import lower_as_collective
from .library import define, fake, implement

PINNED, PAGEABLE = "pinned", "pageable"  # kinds of host memory

copy_to_device = define("copy_to_device(Tensor[] host_tensors, Device device) -> Tensor[]")
copy_to_host = define(
    "copy_to_host(Tensor[] tensors, str host_memory, bool host_reads) -> Tensor[]"
)
lower_as_collective(copy_to_device)
lower_as_collective(copy_to_host)


def to_host_memory(tensor: torch.Tensor, host_memory: str | None) -> torch.Tensor:
    """Copy ``tensor`` to the given kind of host memory.

    Return ``tensor`` itself if it is on the CPU and pinned as required, if it is on meta, or if
    ``host_memory`` is None. Pinned memory also counts as pageable.
    """
    if not host_memory or tensor.is_meta:
        return tensor
    tensor = tensor.cpu()
    return tensor if host_memory != PINNED or tensor.is_pinned() else tensor.pin_memory()


class _Launch:
    """Copies launched together: their event, and the streams that already wait for it."""

    def __init__(self, event: torch.Event, device: torch.device) -> None:
        self._event, self._device = event, device
        self._streams: set[torch.Stream] = set()
        self._host_has_waited = False

    def wait_on_stream(self) -> None:
        stream = torch.accelerator.current_stream(self._device)
        if stream not in self._streams:
            stream.wait_event(self._event)
            self._streams.add(stream)

    def wait_on_host(self) -> None:
        if not self._host_has_waited:
            self._event.synchronize()
            self._host_has_waited = True


class _HostCopy(dist.Work):
    """A launched copy, whose wait makes the current stream wait and releases the source."""

    def __init__(
        self, launch: _Launch, target: torch.Tensor, source: torch.Tensor, host_reads: bool
    ) -> None:
        super().__init__()
        self._launch, self._target, self._source = launch, target, source
        self._host_reads = host_reads

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._launch.wait_on_stream()
        if self._host_reads:
            register_work(self._target, _HostWait(self._launch))  # the second wait
        del self._target, self._source
        return True


class _HostWait(dist.Work):
    def __init__(self, launch: _Launch) -> None:
        super().__init__()
        self._launch = launch

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._launch.wait_on_host()
        return True


@functools.cache
def _copy_stream(device: torch.device, target_type: str) -> torch.Stream:
    return torch.Stream(device=device)  # one for each direction


@implement(copy_to_device)
def _copy_to_device(host_tensors: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    copies = _copy_to_device_fake(host_tensors, device)
    _launch_copies(copies, host_tensors, device, host_reads=False)
    return copies


@fake(copy_to_device)
def _copy_to_device_fake(
    host_tensors: list[torch.Tensor], device: torch.device
) -> list[torch.Tensor]:
    return [torch.empty_like(tensor, device=device) for tensor in host_tensors]


@implement(copy_to_host)
def _copy_to_host(
    tensors: list[torch.Tensor], host_memory: str, host_reads: bool
) -> list[torch.Tensor]:
    pinned = host_memory == PINNED and tensors[0].device.type != "cpu"
    copies = [torch.empty_like(tensor, device="cpu", pin_memory=pinned) for tensor in tensors]
    _launch_copies(copies, tensors, tensors[0].device, host_reads)
    return copies


fake(copy_to_host)(
    lambda tensors, host_memory, host_reads: [torch.empty_like(t, device="cpu") for t in tensors]
)


def _launch_copies(
    targets: list[torch.Tensor],
    sources: list[torch.Tensor],
    device: torch.device,
    host_reads: bool,
) -> None:
    if device.type == "cpu":
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        return
    stream = _copy_stream(device, targets[0].device.type)
    # The device's tensors were allocated on the compute stream, which must be done with them.
    stream.wait_stream(torch.accelerator.current_stream(device))
    with stream:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
    launch = _Launch(stream.record_event(), device)
    for target, source in zip(targets, sources, strict=True):
        register_work(target, _HostCopy(launch, target, source, host_reads))
