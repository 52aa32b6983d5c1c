"""What runs in a rank process of `tests.ranks`: it joins the process group, then calls one function
after the other for the parent and sends back what each returns, or the traceback of what it raises.
Between calls it puts back the global state that it started with."""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import gc
import io
import multiprocessing
import os
import pickle
import random
import reprlib
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo

from .quick import compile_quicker, on_large_stack

COLLECTIVE_TIMEOUT = timedelta(seconds=60)
_make_group = ProcessGroupGloo.__init__
# Global settings of torch that are put back after each call: how to read and how to set one.
SETTINGS: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
]
UNFREEZE_EVERY = 25  # calls; frees the cycles that became garbage after they were frozen
CONFIGS = ["torch._dynamo.config", "torch._functorch.config", "torch._inductor.config"]


@dataclass(frozen=True)
class Failure:
    """Why a rank did not return a result."""

    rank: int
    text: str  # the traceback, or what became of the rank
    at: float  # time.monotonic(), which is the same clock in all processes


@dataclass(frozen=True)
class Spec:
    """What a rank is told at its start."""

    rank: int
    world_size: int
    backend: str
    port: int  # of the parent's store
    folder: Path

    @property
    def task(self) -> Path:
        """What all ranks are to call, while the parent waits for their replies."""
        return self.folder / "task"

    @property
    def output(self) -> Path:
        """The file of the rank's stdout and stderr."""
        return self.folder / f"output.{self.rank}"

    @property
    def stacks(self) -> Path:
        """Of all threads, written on SIGUSR1 or on a crash."""
        return self.folder / f"stacks.{self.rank}"


def to_bytes(value: Any) -> bytes:
    """Return the bytes of `torch.save`, which share no memory with the value."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def from_bytes(data: bytes) -> Any:
    """Return the value of `to_bytes`, with all tensors on the CPU."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def pack_task(fn: Callable[..., Any], args: Any, kwargs: Any, env: Mapping[str, str]) -> bytes:
    """Return the bytes of a call, for `_call`."""
    # The path apart and first: without it a rank may not find fn's module.
    return pickle.dumps((sys.path, dict(env), to_bytes((fn, args, kwargs))))


def _call(task: Path) -> Any:
    """Make the call that the parent has written to a file."""
    path, env, data = pickle.loads(task.read_bytes())
    sys.path[:] = path
    os.environ.update(env)
    fn, args, kwargs = from_bytes(data)
    return fn(*args, **kwargs)


def main(pipe: Connection, spec: Spec) -> None:
    """Serve the parent's calls until it closes the pipe: the entry point of a rank process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its ranks
    threading.Thread(target=_end_with_parent, args=(spec.folder,), daemon=True).start()
    stacks = spec.stacks.open("a")
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks)
    _redirect_output(spec.output)
    # Most lines run on all ranks, and to count them takes half as long again.
    counts_lines = spec.rank == (0 if spec.world_size <= 2 else spec.world_size - 1)
    if not counts_lines:
        _stop_coverage()
    _reply(pipe, spec, lambda: _join_group(spec))
    defaults = _Defaults()  # imports torch._dynamo
    compile_quicker()
    with contextlib.suppress(EOFError, OSError):  # the parent has closed the pipe
        while True:
            pipe.recv_bytes()
            _reply(pipe, spec, lambda: on_large_stack(lambda: _call(spec.task)))
            defaults.restore()
    if counts_lines and (coverage := _coverage()):
        coverage.save()  # before what may hang
    if dist.is_initialized():
        dist.destroy_process_group()


def _coverage() -> Any:
    """Return what counts the lines that run in this process, None if nothing does."""
    module: Any = sys.modules.get("coverage")
    return module and module.Coverage.current()


def _stop_coverage() -> None:
    """End what counts lines, which are two in a process that imports torch itself."""
    for _ in range(2):
        if coverage := _coverage():
            # One that the server of a forked process has started counts nothing here.
            with contextlib.suppress(AssertionError):
                coverage.stop()


def _end_with_parent(folder: Path) -> None:
    """Wait for the end of the parent, then end this process."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(folder, ignore_errors=True)  # which the parent had no time to do
    os._exit(1)


def _redirect_output(path: Path) -> None:
    """Into a file, which the parent prints: its own stdout may be another one for each test."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        os.dup2(fd, stream.fileno())
        stream.reconfigure(line_buffering=True)


def _make_gloo(
    group: ProcessGroupGloo, store: dist.Store, rank: int, size: int, timeout: timedelta
) -> None:
    """Make a group whose collectives one thread runs, in order.

    From its usual two threads gloo writes one string without a lock, and once in some thousands of
    tests a rank dies of it: `lastCompletedWorkName` in `ProcessGroupGloo::runLoop`, 2.11 to 2.13.
    """
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(interface="lo")]
    options._timeout, options._threads = timeout, 1
    _make_group(group, store, rank, size, options)


def _join_group(spec: Spec) -> None:
    """Initialise the default process group."""
    ProcessGroupGloo.__init__ = _make_gloo
    if spec.backend == "recording":
        from . import recording  # noqa: F401 (registers the backend)
    store = dist.TCPStore("127.0.0.1", spec.port, is_master=False, timeout=COLLECTIVE_TIMEOUT)
    dist.init_process_group(
        spec.backend,
        store=store,
        rank=spec.rank,
        world_size=spec.world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )


def _reply(pipe: Connection, spec: Spec, work: Callable[[], Any]) -> None:
    """Send what work returns, and whether there is a process group behind it. If it raises, send
    the traceback and end this rank."""
    reply: tuple[bytes, bool] | Failure
    try:
        reply = to_bytes(work()), dist.is_initialized()
    except BaseException as error:
        reply = Failure(spec.rank, _describe(error), time.monotonic())
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    pipe.send_bytes(pickle.dumps(reply))
    if isinstance(reply, Failure):
        os._exit(1)  # closes its connections, so that ranks that wait for this one fail at once


def _describe(error: BaseException) -> str:
    """Return the traceback of an error, without the frames that lead to the call."""
    frames = error.__traceback__
    own = (__file__, on_large_stack.__code__.co_filename)
    while frames and frames.tb_next and frames.tb_frame.f_code.co_filename in own:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    if isinstance(error, AssertionError) and not error.args:
        text += _describe_locals(frames)
    return text


def _describe_locals(frames: TracebackType | None) -> str:
    """Those of the innermost frame, since pytest does not explain the asserts of a rank."""
    while frames and frames.tb_next:
        frames = frames.tb_next
    short = reprlib.Repr()
    short.maxother = short.maxstring = 300
    values = frames.tb_frame.f_locals if frames else {}
    return "".join(f"    {name} = {short.repr(value)}\n" for name, value in values.items())


class _Defaults:
    """The global state that every call starts with. Process groups that a call has made stay: the
    caches of DTensor hold meshes, which refer to groups by name."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._environ = dict(os.environ)
        self._settings = [(get, put, get()) for get, put in SETTINGS]
        modules = [import_module(name) for name in CONFIGS]
        self._configs = [(m, copy.deepcopy(m.get_config_copy())) for m in modules]
        self._num_calls = 0
        self.restore()

    def restore(self) -> None:
        """Put back all settings, forget compiled graphs, and seed random generators with 0."""
        set_environ(self._environ)
        for get, put, value in self._settings:
            if get() != value:
                put(value)
        torch.set_default_device(None)
        self._restore_configs()
        torch._dynamo.reset()
        if recording := sys.modules.get(f"{__package__}.recording"):
            recording.clear()
            recording.wire()
        self._collect_garbage()
        random.seed(0)
        torch.manual_seed(0)

    def _collect_garbage(self) -> None:
        """Free what the call has left; later collections need not look at what has survived.

        Caches of torch keep hundreds of thousands of objects. Looking at all of them in every
        collection would double the time of a call after some fifty calls.
        """
        if self._num_calls % UNFREEZE_EVERY == 0:
            gc.unfreeze()
        self._num_calls += 1
        gc.collect()
        gc.freeze()

    def _restore_configs(self) -> None:
        """Put back the settings of torch's compilers that differ from the defaults."""
        for module, values in self._configs:
            now = module.get_config_copy()
            for name, value in values.items():
                if now[name] != value:
                    setattr(module, name, copy.deepcopy(value))


def set_environ(values: Mapping[str, str]) -> None:
    """Make the environment equal to `values`."""
    for name in os.environ.keys() - values.keys():
        del os.environ[name]
    os.environ.update(values)
