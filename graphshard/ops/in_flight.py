"""Wait for the collectives that are still in flight when an error ends a graph.

    launched = all_gather_into_tensor(..)    error!    # wait_tensor(launched) is never reached

Torch keeps a launched collective, with the memory that it reads and writes, until it is waited for.
A user who catches "out of memory" and tries a smaller batch would have less memory each time.
Therefore, before an error leaves a graph, its collectives are waited for; for host tensors, at most
``LIMIT_S`` seconds. The traceback keeps the launched tensors alive, as local variables of generated
code. Without an error, nothing is waited for.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from .._torch.autograd import on_graph_error
from .._torch.distributed import num_registered_works
from .._torch.frames import locals_at
from .nodes import WAIT

R = TypeVar("R")

# Longest delay of an error, in seconds. Ranks that run the same graph launch everything that a
# failed rank has launched, unless they fail earlier. If they do, a background thread keeps waiting
# until the process group's timeout.
LIMIT_S = 5.0


def wait_in_flight_on_error(compiled: Callable[..., R]) -> Callable[..., R]:
    """Wrap a compiled graph to wait for its collectives in flight if it or its backward raises."""
    return on_graph_error(compiled, _wait_at)


def _wait_at(error: BaseException) -> None:
    if num_registered_works():
        # Coalesced collectives return lists; graphs never launch on subclasses.
        lists = (v if isinstance(v, list | tuple) else [v] for v in locals_at(error))
        _wait_for([v for values in lists for v in values if type(v) is torch.Tensor])


def _wait_for(tensors: list[torch.Tensor]) -> None:
    on_host = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    _wait_now([tensor for tensor in tensors if tensor.device.type != "cpu"])
    # Waits for device tensors only make their stream wait; waits for host tensors block.
    waiter = threading.Thread(target=_wait_now, args=(on_host,), daemon=True)
    waiter.start()
    waiter.join(LIMIT_S)


def _wait_now(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        # Copies that the host reads take two waits (``host_copy``). Failed work is not in flight.
        for _ in range(2):
            with contextlib.suppress(Exception), torch.no_grad():
                WAIT(tensor)
