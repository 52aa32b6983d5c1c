"""Rank process of `tests.ranks`.

Joins the process group, then runs the parent's calls one by one and replies to each with the result
or the traceback. Between calls, the process restores its initial global state.
"""

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

from graphshard.cpython_tuning import with_stack_room

from .quick import compile_quicker

COLLECTIVE_TIMEOUT = timedelta(seconds=60)
_make_group = ProcessGroupGloo.__init__
# (getter, setter) of global torch settings, restored after each call.
SETTINGS: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
]
UNFREEZE_EVERY = 25  # calls; unfreezing frees cycles that became garbage while frozen
CONFIGS = ["torch._dynamo.config", "torch._functorch.config", "torch._inductor.config"]


@dataclass(frozen=True)
class Failure:
    rank: int
    text: str  # the traceback, or what happened to the rank
    at: float  # time.monotonic(), the same clock in all processes


@dataclass(frozen=True)
class Spec:
    rank: int
    world_size: int
    backend: str
    port: int  # port of the parent's store
    folder: Path

    @property
    def task(self) -> Path:
        return self.folder / "task"

    @property
    def output(self) -> Path:
        return self.folder / f"output.{self.rank}"

    @property
    def stacks(self) -> Path:
        """File with the stacks of all threads, written on SIGUSR1 and on a crash."""
        return self.folder / f"stacks.{self.rank}"


def to_bytes(value: Any) -> bytes:
    """Serialize a value with `torch.save`, so no memory is shared between processes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def from_bytes(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def pack_task(fn: Callable[..., Any], args: Any, kwargs: Any, env: Mapping[str, str]) -> bytes:
    # sys.path is unpickled first: a rank may need it to import fn's module.
    return pickle.dumps((sys.path, dict(env), to_bytes((fn, args, kwargs))))


def _call(task: Path) -> Any:
    path, env, data = pickle.loads(task.read_bytes())
    sys.path[:] = path
    os.environ.update(env)
    fn, args, kwargs = from_bytes(data)
    return fn(*args, **kwargs)


def main(pipe: Connection, spec: Spec) -> None:
    """Serve the parent's calls until it closes the pipe: the entry point of a rank process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends its ranks
    threading.Thread(target=_end_with_parent, args=(spec.folder,), daemon=True).start()
    stacks = spec.stacks.open("a")
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks)
    _redirect_output(spec.output)
    # Only one rank measures coverage: most lines run on all ranks, and measuring takes 50 % longer.
    counts_lines = spec.rank == (0 if spec.world_size <= 2 else spec.world_size - 1)
    if not counts_lines:
        _stop_coverage()
    _reply(pipe, spec, lambda: _join_group(spec))
    defaults = _Defaults()  # imports torch._dynamo
    compile_quicker()
    with contextlib.suppress(EOFError, OSError):  # the parent has closed the pipe
        while True:
            pipe.recv_bytes()
            _reply(pipe, spec, with_stack_room(lambda: _call(spec.task)))
            defaults.restore()
    if counts_lines and (coverage := _coverage()):
        coverage.save()  # first, since destroying the group may hang
    if dist.is_initialized():
        dist.destroy_process_group()


def _coverage() -> Any:
    module: Any = sys.modules.get("coverage")
    return module and module.Coverage.current()


def _stop_coverage() -> None:
    """Stop all coverage measurements, of which a process that imports torch itself has two."""
    for _ in range(2):
        if coverage := _coverage():
            # A measurement inherited from the fork server is inactive and cannot be stopped.
            with contextlib.suppress(AssertionError):
                coverage.stop()


def _end_with_parent(folder: Path) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(folder, ignore_errors=True)  # the parent could not remove it
    os._exit(1)


def _redirect_output(path: Path) -> None:
    """Redirect stdout and stderr to a file, which the parent prints.

    Inheriting them does not work: pytest may replace the parent's stdout for each test.
    """
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        os.dup2(fd, stream.fileno())
        stream.reconfigure(line_buffering=True)


def _make_gloo(
    group: ProcessGroupGloo, store: dist.Store, rank: int, size: int, timeout: timedelta
) -> None:
    """Initialize a gloo group that runs its collectives in order, in one thread.

    By default, two threads write the string `lastCompletedWorkName` in `ProcessGroupGloo::runLoop`
    without a lock (torch 2.11 to 2.13), which crashes a rank once in several thousand tests.
    """
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(interface="lo")]
    options._timeout, options._threads = timeout, 1
    _make_group(group, store, rank, size, options)


def _join_group(spec: Spec) -> None:
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
    """Send the result of `work()`, and whether a process group exists afterwards.

    If it raises, send the traceback and exit this process.
    """
    reply: tuple[bytes, bool] | Failure
    try:
        reply = to_bytes(work()), dist.is_initialized()
    except BaseException as error:
        reply = Failure(spec.rank, _describe(error), time.monotonic())
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    pipe.send_bytes(pickle.dumps(reply))
    if isinstance(reply, Failure):
        os._exit(1)  # closes the connections, so ranks that wait for this one fail at once


def _describe(error: BaseException) -> str:
    """Format an error's traceback without the harness's frames; add locals if an assert is bare."""
    frames = error.__traceback__
    own = (__file__, with_stack_room.__code__.co_filename)
    while frames and frames.tb_next and frames.tb_frame.f_code.co_filename in own:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    if isinstance(error, AssertionError) and not error.args:
        text += _describe_locals(frames)
    return text


def _describe_locals(frames: TracebackType | None) -> str:
    """Format the locals of the innermost frame, since pytest does not rewrite asserts on ranks."""
    while frames and frames.tb_next:
        frames = frames.tb_next
    short = reprlib.Repr()
    short.maxother = short.maxstring = 300
    values = frames.tb_frame.f_locals if frames else {}
    return "".join(f"    {name} = {short.repr(value)}\n" for name, value in values.items())


class _Defaults:
    """Global state at the start of every call.

    Process groups created by a call are kept: DTensor's caches hold meshes, which refer to groups
    by name.
    """

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._environ = dict(os.environ)
        self._settings = [(get, put, get()) for get, put in SETTINGS]
        modules = [import_module(name) for name in CONFIGS]
        self._configs = [(m, copy.deepcopy(m.get_config_copy())) for m in modules]
        self._num_calls = 1  # the fork server has frozen its objects
        self.restore()

    def restore(self) -> None:
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
        """Collect the garbage of the last call, then exempt the surviving objects.

        Torch's caches keep hundreds of thousands of objects. If every collection traversed them,
        calls would take twice as long after about fifty calls.
        """
        if self._num_calls % UNFREEZE_EVERY == 0:
            gc.unfreeze()
        self._num_calls += 1
        gc.collect()
        gc.freeze()

    def _restore_configs(self) -> None:
        for module, values in self._configs:
            now = module.get_config_copy()
            for name, value in values.items():
                if now[name] != value:
                    setattr(module, name, copy.deepcopy(value))


def set_environ(values: Mapping[str, str]) -> None:
    for name in os.environ.keys() - values.keys():
        del os.environ[name]
    os.environ.update(values)
