"""Run a function on several ranks, cheaply: `run(world_size, fn, *args)` returns what fn returned
on every rank. Starting a rank costs seconds (it imports torch), so the rank processes of a (world
size, backend) stay alive for the next call and are reset between calls. A rank that raises, dies or
hangs fails the call with a `RankError` that has every failing rank's traceback or stack; its pool
is then killed and started anew by the next call. Parent and ranks talk over pipes, and every value
travels as the bytes of `torch.save`, never as shared memory."""

from __future__ import annotations

import atexit
import contextlib
import copy
import faulthandler
import gc
import importlib
import importlib.util
import io
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

MAX_POOLS = 2  # alive at once; a rank that has compiled something holds several hundred MB
GRACE_S = 10.0  # what the other ranks are given after the first failure
STARTUP_S = 120.0
COLLECTIVE_TIMEOUT = timedelta(seconds=60)

# What ranks find in their environment unless the caller's has it already.
RANK_ENV = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # compile in the rank, not in a pool of its own children
    "GLOO_SOCKET_IFNAME": "lo",  # or gloo asks the resolver for the host's name, which may fail
}
# Imported once, in the server that ranks are forked from. None of these starts a thread.
PRELOAD = [
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "pytest",
]


class RankError(RuntimeError):
    """At least one rank failed; `failures` has them in the order in which they failed."""

    def __init__(self, failures: Sequence[Failure], world_size: int) -> None:
        self.failures = tuple(failures)
        parts = [f"--- rank {f.rank} of {world_size}: {f.text.rstrip()}" for f in failures]
        super().__init__("\n\n".join(["ranks failed", *parts]))


@dataclass(frozen=True)
class Failure:
    rank: int
    text: str  # traceback of the exception, or what became of the rank
    at: float  # time.monotonic(), which all processes of a machine share


def run(
    world_size: int,
    fn: Callable[..., T],
    *args: Any,
    backend: str = "gloo",
    timeout_s: float = 240.0,
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[T]:
    """fn(*args, **kwargs) on each of world_size ranks: the results, in rank order.

    fn is a function at the top level of an importable module. It starts with the default process
    group up, the seeds at 0, one thread, Dynamo reset and torch's global settings at their
    defaults. env is set in the ranks for the call, so it does not reach what torch reads when it
    is imported; `run_fresh` does that.
    """
    __tracebackhide__ = True
    key = (world_size, backend)
    pool = _pools.pop(key, None) or _Pool(world_size, backend)
    _pools[key] = pool  # at the end: the most recently used
    while len(_pools) > MAX_POOLS:
        _pools.popitem(last=False)[1].close()
    try:
        return pool.call(fn, args, kwargs, timeout_s, env or {})
    except BaseException:  # a KeyboardInterrupt too: the ranks are still in the middle of fn
        _pools.pop(key, None)
        pool.close()
        raise


def run_fresh(
    world_size: int,
    fn: Callable[..., T],
    *args: Any,
    backend: str = "gloo",
    timeout_s: float = 240.0,
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[T]:
    """`run` in new processes that are thrown away: to measure memory, or for state that lasts.

    With env, even an empty one, they are not forked from the server that has torch imported but
    start from nothing, with env set: seconds slower.
    """
    __tracebackhide__ = True
    pool = _Pool(world_size, backend, env)
    try:
        return pool.call(fn, args, kwargs, timeout_s, {})
    finally:
        pool.close()


def close_pools() -> None:
    """End all ranks that wait for the next call."""
    while _pools:
        _pools.popitem()[1].close()


class _Pool:
    """Rank processes with one process group, and the parent's ends of their pipes."""

    def __init__(self, world_size: int, backend: str, env: Mapping[str, str] | None = None) -> None:
        self.world_size = world_size
        self._dir = tempfile.TemporaryDirectory(prefix="ranks-")
        # The parent hosts the store: it outlives any rank, and the system picks the port.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._outputs: list[io.TextIOWrapper] = []
        try:
            with _environment({**RANK_ENV, **os.environ, **(env or {})}):
                for rank in range(world_size):
                    self._start(_Spec(rank, world_size, backend, self._store.port, self._dir.name))
            self._collect(STARTUP_S, "did not start")
        except BaseException:
            self.close()
            raise

    def _start(self, spec: _Spec, env: Mapping[str, str] | None = None) -> None:
        context = _context(env)
        ours, theirs = context.Pipe()
        args = (theirs, spec)
        process = context.Process(target=_rank_main, args=args, daemon=True)
        self._pipes.append(ours)
        for path in (spec.output, spec.stacks):
            path.touch()
        self._outputs.append(spec.output.open(errors="replace"))
        process.start()
        self._processes.append(process)
        theirs.close()  # so that the pipe ends when the rank does
