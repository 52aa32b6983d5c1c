"""Run functions in a child process that simulates a GPU.

    this process                        child
    call("module:function", device, ..) ──► no_gpu.so, torch, stand-ins ──► function(recorder, ..)
                                        ◄── the return value, or a Failure

Each call needs its own process: the simulation modifies torch permanently, and its C++ library must
be loaded before torch. Arguments and results are pickled. The child's stderr is forwarded.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from .._torch.no_gpu.build import build, torch_library
from .._torch.no_gpu.stand_ins import DeviceProperties, check_versions, install, listen, replace
from ..failures import Failure, describe_failure
from ..ops import host_copy
from ..params import checks
from ..pipeline import meter
from .gpus import GPUS, has_float8
from .recorder import Recorder

_BOOT = """
import ctypes, sys
for path in sys.argv[1:3]:
    ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
from graphshard.check.process import main
main(*sys.argv[2:5])
"""


class CheckError(RuntimeError):
    """Error raised if a function in a child process fails, its process dies, or time runs out."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.details}\n{failure.cause}".strip())
        self.failure = failure


# --- this process --------------------------------------------------------------------------------


def obstacle() -> str:
    """Return why the installed torch and triton cannot simulate a GPU, or "" if they can."""
    if torch.version.cuda is not None:
        return (
            "a simulated GPU needs a CPU build of torch, but this one is for CUDA "
            f"{torch.version.cuda}: in a separate environment, pip install torch==2.13.0 "
            "--index-url https://download.pytorch.org/whl/cpu"
        )
    if find_spec("triton") is None:
        return "a simulated GPU needs triton: pip install triton==3.7.1"
    try:
        check_versions()
    except RuntimeError as error:
        return str(error)
    return ""


def call(function: str, device: str, *args: Any, timeout_s: float = 600.0) -> Any:
    """Call ``function(recorder, *args)`` in a new process and return its result.

    Args:
        function: "module:name" of a function at the top level of a module.
        device: key of ``graphshard.check.gpus.GPUS``.

    Raises:
        CheckError: the function raised an error, or the process ended without an answer or took
            longer than ``timeout_s``.
        RuntimeError: there is no C++ compiler, or ``obstacle`` returns a reason.
    """
    if reason := obstacle():
        raise RuntimeError(reason)
    with tempfile.TemporaryDirectory() as folder:
        request, answer = Path(folder) / "request", Path(folder) / "answer"
        request.write_bytes(pickle.dumps((sys.path, function, device, args)))
        libraries = [str(torch_library()), str(build())]
        command = [sys.executable, "-c", _BOOT, *libraries, str(request), str(answer)]
        done = _run(command, timeout_s)
        if not answer.exists():
            raise CheckError(_describe_exit(done))
        answered = pickle.loads(answer.read_bytes())
    if stderr := _for_users(done.stderr).rstrip():
        print(stderr, file=sys.stderr)
    if isinstance(answered, Failure):
        raise CheckError(answered)
    return answered


def _run(command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, stderr=subprocess.PIPE, text=True, timeout=timeout_s, env=_environment()
        )
    except subprocess.TimeoutExpired as error:
        stderr = error.stderr or ""
        stderr = stderr.decode(errors="replace") if isinstance(stderr, bytes) else stderr
        raise CheckError(
            Failure(
                f"the check did not finish within {timeout_s:.0f} s: use a model with fewer "
                "repeated layers, or raise --timeout",
                details=stderr,
            )
        ) from error


def _describe_exit(done: subprocess.CompletedProcess[str]) -> Failure:
    status = done.returncode
    cause = f"exit status {status}" if status >= 0 else f"signal {-status}"
    text = _for_users(done.stderr[-8000:]).strip()
    lines = text.splitlines()[-1:]
    return Failure(": ".join([f"the process ended with {cause}", *lines]), details=text)


def _for_users(text: str) -> str:
    # Strip the rank prefix that torch adds to each line, and C++ warnings about fake tensors.
    text = re.sub(r"^\[rank\d+\]: ?", "", text, flags=re.MULTILINE)
    return re.sub(r"^\[W.*data pointer of FakeTensor.*\n?", "", text, flags=re.MULTILINE)


def _environment() -> dict[str, str]:
    # The child must find modules where this process does, except in the working directory (an empty
    # entry), where a folder may have the name of a module.
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


# --- the child -----------------------------------------------------------------------------------


def main(library: str, request: str, answer: str) -> None:
    """Call the function that ``request`` names and write its result or error to ``answer``."""
    sys.path[:], *request_args = pickle.loads(Path(request).read_bytes())
    # Both warnings are expected: caches are off, and fake tensors have no data.
    warnings.filterwarnings("ignore", "dynamo_pgo force disabled|Accessing the data pointer")
    try:
        written = pickle.dumps(_call(library, *request_args))
    except (Exception, SystemExit) as error:
        written = pickle.dumps(describe_failure(error))
    Path(answer).write_bytes(written)


def _call(library: str, function: str, device: str, args: Sequence[Any]) -> Any:
    recorder = Recorder()
    install(GPUS[device], recorder)
    listener = listen(ctypes.CDLL(library), recorder.stream_asked)
    replace(host_copy, register_work=recorder.register)
    replace(checks, float8_error=_float8_error(GPUS[device]))
    replace(meter, FIRST=None)  # do not time runs, which would record events
    module, _, name = function.partition(":")
    result = getattr(import_module(module), name)(recorder, *args)
    del listener  # kept alive until here, because C++ calls it
    return result


def _float8_error(device: DeviceProperties) -> Callable[[str, str], str | None]:
    # Replaces a check that would run fp8 matrix products on the device.
    def error(device_type: str, recipe: str) -> str | None:
        return None if has_float8(device, recipe) else f"{device.name} has no {recipe} products"

    return error
