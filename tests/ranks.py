"""Run a function on several ranks, in a pool of rank processes.

`run(world_size, fn, *args)` returns the results of all ranks. Starting ranks is slow, so the
processes of each (world size, backend) stay alive for the next call and are reset between calls. If
a rank raises, dies or hangs, the call raises a `RankError` with the traceback or stacks of every
failing rank; the pool is discarded, and the next call starts a new one. Values are serialized with
`torch.save`, never passed through shared memory.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from unittest import mock

import torch
import torch.distributed as dist

from . import rank_process
from .rank_process import Failure, Spec, from_bytes, pack_task

P = ParamSpec("P")
T = TypeVar("T")

MAX_POOLS = 2  # alive at once: a rank that has compiled takes hundreds of MB
GRACE_S = 10.0  # time for the other ranks to reply after the first failure
STARTUP_S = 120.0
EXIT_S = 5.0

# Environment variables of ranks; the caller's own values take precedence.
RANK_ENV = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    # Two threads, since ranks compile the same kernels and wait for each other's Inductor locks:
    # with one thread per rank, the second core would be idle.
    "TORCHINDUCTOR_COMPILE_THREADS": "2",
    "TORCH_WARM_POOL": "0",  # CPUs need no Triton worker processes
    "GLOO_SOCKET_IFNAME": "lo",  # otherwise gloo resolves the host name, which may fail
}
# Imported once, by the fork server. None of these modules starts a thread.
PRELOAD = [
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "pytest",
    "tests.preload",
]


class RankError(RuntimeError):
    """Raised if at least one rank failed.

    Attributes:
        failures: failures of the ranks that failed, in chronological order.
    """

    def __init__(self, failures: Sequence[Failure], world_size: int) -> None:
        self.failures = tuple(failures)
        parts = [f"--- rank {f.rank} of {world_size}: {f.text.rstrip()}" for f in failures]
        super().__init__("\n\n".join([f"{len(failures)} of {world_size} ranks failed", *parts]))


def run(
    world_size: int,
    fn: Callable[..., T],
    *args: Any,
    backend: str = "gloo",
    timeout_s: float = 240.0,
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[T]:
    """Call fn(*args, **kwargs) on each of world_size ranks; return the results in rank order.

    The default process group is initialized, seeds are 0, torch uses one thread, Dynamo is reset,
    and global torch settings have their defaults.

    Args:
        fn: function at the top level of a module.
        timeout_s: time after which ranks that have not replied fail.
        env: environment variables to set during the call. All others keep the values that they had
            when the first rank was started. For variables that torch reads on import, use
            `import_env` of `run_fresh`.

    Raises:
        RankError: if a rank raises, dies or does not reply in time.
    """
    __tracebackhide__ = True
    task = pack_task(fn, args, kwargs, env or {})
    key = (world_size, backend)
    pool = _pools.pop(key, None)
    if pool is None:
        while len(_pools) >= MAX_POOLS:
            _pools.popitem(last=False)[1].close()
        pool = _Pool(world_size, backend)
    results = pool.call(task, timeout_s)
    if pool.has_group:
        _pools[key] = pool  # at the end, as the most recently used
    else:
        pool.close()
    return results


def on_ranks(
    world_size: int,
    *,
    backend: str = "gloo",
    timeout_s: float = 240.0,
    env: Mapping[str, str] | None = None,
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Decorate a test to run on each of world_size ranks, as `run` does.

    Ranks receive the test's parameters and fixtures, which must be picklable.
    """

    def decorate(test: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(test)
        def run_on_ranks(*args: P.args, **kwargs: P.kwargs) -> None:
            __tracebackhide__ = True
            options: dict[str, Any] = {"backend": backend, "timeout_s": timeout_s, "env": env}
            run(world_size, _call_decorated, run_on_ranks, args, kwargs, **options)

        return run_on_ranks

    return decorate


def _call_decorated(test: Any, args: Any, kwargs: Any) -> None:
    """Call the function that `on_ranks` decorated: only the wrapper can be pickled by name."""
    test.__wrapped__(*args, **kwargs)


def run_fresh(
    world_size: int,
    fn: Callable[..., T],
    *args: Any,
    backend: str = "gloo",
    timeout_s: float = 240.0,
    env: Mapping[str, str] | None = None,
    import_env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[T]:
    """Call `run` with new processes that end afterwards, to measure memory or to have no caches.

    With `import_env`, even if empty, each rank imports torch itself with these variables set,
    instead of being forked from a server that has imported torch. This takes seconds.
    """
    __tracebackhide__ = True
    task = pack_task(fn, args, kwargs, env or {})
    pool = _Pool(world_size, backend, import_env)
    results = pool.call(task, timeout_s)
    pool.close()
    return results


def close_pools() -> None:
    while _pools:
        _pools.popitem()[1].close()


class _Pool:
    """The processes of one process group, and the parent's ends of their pipes.

    Attributes:
        has_group: whether all ranks still have the group. If not, the pool cannot be reused,
            because DTensor's caches keep names of groups.
    """

    def __init__(self, world_size: int, backend: str, env: Mapping[str, str] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        # Hosted by the parent, which outlives the ranks; port 0: any free port.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port, folder = self._store.port, Path(self._folder.name)
        self._specs = [Spec(rank, world_size, backend, port, folder) for rank in range(world_size)]
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._outputs: list[io.TextIOWrapper] = []
        self.has_group = True
        try:
            with mock.patch.dict(os.environ, {**RANK_ENV, **os.environ, **(env or {})}):
                for spec in self._specs:
                    self._start(spec, _start_context(fork=env is None))
            self._collect(STARTUP_S)
        except BaseException:
            self._kill()
            raise

    def _start(self, spec: Spec, context: Any) -> None:
        spec.stacks.touch()
        spec.output.touch()
        self._outputs.append(spec.output.open(errors="replace"))
        ours, theirs = context.Pipe()
        self._pipes.append(ours)
        process = context.Process(target=rank_process.main, args=(theirs, spec), daemon=True)
        process.start()
        self._processes.append(process)
        theirs.close()  # now the pipe closes when the rank ends

    def call(self, task: bytes, timeout_s: float) -> list[Any]:
        __tracebackhide__ = True
        try:
            self._specs[0].task.write_bytes(task)
            for pipe in self._pipes:
                with contextlib.suppress(OSError):  # _collect reports that the rank is dead
                    pipe.send_bytes(b"go")
            return [from_bytes(value) for value in self._collect(timeout_s)]
        except BaseException:  # KeyboardInterrupt, too: ranks are in the middle of the task
            self._kill()
            raise

    def _collect(self, timeout_s: float) -> list[bytes]:
        __tracebackhide__ = True
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        values: dict[int, bytes] = {}
        failures: list[Failure] = []
        deadline = time.monotonic() + timeout_s
        while waiting and (left := deadline - time.monotonic()) > 0:
            ready = wait(list(waiting), left)
            for pipe in [pipe for pipe in waiting if pipe in ready]:
                rank = waiting.pop(pipe)
                reply = self._receive(rank)
                if isinstance(reply, Failure):
                    failures.append(reply)
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                else:
                    values[rank] = reply
        failures.sort(key=lambda failure: failure.at)
        late = f"{GRACE_S:g} s after the first failure" if failures else f"after {timeout_s:g} s"
        failures += self._stuck(sorted(waiting.values()), late)
        self._forward_output()
        if failures:
            raise RankError(failures, len(self._specs))
        return [values[rank] for rank in range(len(self._specs))]

    def _receive(self, rank: int) -> bytes | Failure:
        try:
            reply = pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, OSError):
            process = self._processes[rank]
            process.join(5)
            text = f"died, {_describe_exit(process.exitcode)}\n" + self._read_stacks(rank)
            return Failure(rank, text, time.monotonic())
        if isinstance(reply, Failure):
            return reply
        value, has_group = reply
        self.has_group &= has_group
        return value

    def _stuck(self, ranks: list[int], late: str) -> list[Failure]:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        if ranks:
            time.sleep(0.5)  # time to write the stacks; ranks do not signal completion
        text = f"still running {late}; its stacks:\n"
        return [Failure(r, text + self._read_stacks(r), time.monotonic()) for r in ranks]

    def _read_stacks(self, rank: int) -> str:
        return self._specs[rank].stacks.read_text(errors="replace")

    def _forward_output(self) -> None:
        for rank, output in enumerate(self._outputs):
            for line in output.read().splitlines():
                print(f"[rank {rank}] {line}")

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + EXIT_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(EXIT_S)
        self._forward_output()
        for output in self._outputs:
            output.close()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


_pools: OrderedDict[tuple[int, str], _Pool] = OrderedDict()
# Runs before the exit handler of multiprocessing, which terminates ranks and waits for them.
atexit.register(close_pools)


def _start_context(fork: bool) -> Any:
    """Return a multiprocessing context: forkserver if `fork` and there is no GPU, else spawn."""
    # CUDA does not work in a process forked from one that has queried it.
    if not fork or torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"
