"""Waits for the collectives that a graph had launched when an error ended it.

    launched = all_gather_into_tensor(..)    error!    (wait_tensor(launched))

Torch keeps a launched collective, with the memory that it reads and writes, until somebody waits
for it. Somebody who catches "out of memory" and tries a smaller batch would have less memory each
time. So an error that leaves a graph waits for all that is in flight. The generated code has it in
its local variables, which are there as long as the error has a traceback; a run without an error
pays for none of it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch

from .._torch.autograd import on_backward_error
from .._torch.distributed import num_registered_works
from .._torch.frames import locals_at

R = TypeVar("R")

LIMIT_S = 5.0
"""How long an error is held up at most. Ranks that run the same graph launch all that a failed one
has launched, unless they fail earlier in it; then the process group's timeout ends the wait, behind
the error's back."""

_wait_tensor = torch.ops._c10d_functional.wait_tensor.default


def waiting_at_errors(compiled: Callable[..., R]) -> Callable[..., R]:
    """Wrap a compiled graph so that nothing is in flight where an error has left it, or has left
    its backward."""
    is_first = True

    def run(*args: object) -> R:
        nonlocal is_first
        try:
            outputs = compiled(*args)
        except BaseException as error:
            _wait_at(error)
            raise
        if is_first and isinstance(outputs, Sequence):
            on_backward_error(outputs, _wait_at)
        is_first = False
        return outputs

    return run


def _wait_at(error: BaseException) -> None:
    if num_registered_works():
        _wait_for(list(_tensors_in(locals_at(error))))


def _tensors_in(values: Iterable[object]) -> Iterator[torch.Tensor]:
    """Yield the tensors among ``values``, and in the lists among them: coalesced collectives."""
    for value in values:
        for part in value if isinstance(value, list | tuple) else [value]:
            if type(part) is torch.Tensor:  # a subclass is never what a graph launched
                yield part


def _wait_for(tensors: list[torch.Tensor]) -> None:
    """Wait for what is registered for ``tensors``: on a device in its stream, else here."""
    on_host = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    _wait_now([tensor for tensor in tensors if tensor.device.type != "cpu"])
    waiter = threading.Thread(target=_wait_now, args=(on_host,), daemon=True)
    waiter.start()
    waiter.join(LIMIT_S)


def _wait_now(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        # What the host reads is waited for twice (``host_copy``). What fails is not in flight.
        for _ in range(2):
            with contextlib.suppress(Exception), torch.no_grad():
                _wait_tensor(tensor)
