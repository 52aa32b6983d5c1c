"""Run functions in a child process that simulates a GPU.

    this process                        child
    call("module:function", device, ..) ──► no_gpu.so, torch, stand-ins ──► function(recorder, ..)
                                        ◄── Result: the return value; Failure: the error

The child is needed because the stand-ins change torch for good and C++ has to be loaded before
torch. Arguments and results are pickled. The child's stderr, warnings included, is forwarded.
"""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from .._torch.no_gpu.build import build, torch_library
from .._torch.no_gpu.stand_ins import check_versions
from .failure import Failure

_BOOT = """
import ctypes, sys
for path in sys.argv[1:3]:
    ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
from graphshard.check.child import main
main(*sys.argv[2:5])
"""


class CheckError(RuntimeError):
    """The function raised in the child, or the child ended without an answer.

    Attributes:
        failure: description of the error.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.details}\n{failure.cause}".strip())
        self.failure = failure


def obstacle() -> str:
    """Return why this machine cannot simulate a GPU; "" if it can."""
    if torch.version.cuda is not None:
        return (
            f"needs a CPU build of torch, and this one is for CUDA {torch.version.cuda}: in an "
            "environment of its own, pip install torch==2.13.0 --index-url "
            "https://download.pytorch.org/whl/cpu"
        )
    if find_spec("triton") is None:
        return "needs triton: pip install triton==3.7.1"
    try:
        check_versions()
    except RuntimeError as error:
        return str(error)
    return ""


def call(function: str, device: str, *args: Any, timeout_s: float = 600.0) -> Any:
    """Call ``function(recorder, *args)`` in a new process and return its result.

    Args:
        function: "module:name" of a function at the top level of a module.
        device: one of ``graphshard.check.gpus.GPUS``.

    Raises:
        CheckError: the function raised, the process ended, or it took longer than ``timeout_s``.
        RuntimeError: there is no C++ compiler, or the machine has another ``obstacle``.
    """
    if fault := obstacle():
        raise RuntimeError(fault)
    with tempfile.TemporaryDirectory() as folder:
        request, answer = Path(folder) / "request", Path(folder) / "answer"
        request.write_bytes(pickle.dumps((sys.path, function, device, args)))
        libraries = [str(torch_library()), str(build())]
        command = [sys.executable, "-c", _BOOT, *libraries, str(request), str(answer)]
        done = _run(command, timeout_s)
        if not answer.exists():
            raise CheckError(_describe_exit(done))
        answered = pickle.loads(answer.read_bytes())
    _forward(done.stderr)
    if isinstance(answered, Failure):
        raise CheckError(answered)
    return answered.value


def _run(command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a command and capture its stderr."""
    try:
        return subprocess.run(
            command, stderr=subprocess.PIPE, text=True, timeout=timeout_s, env=_environment()
        )
    except subprocess.TimeoutExpired as error:
        raise CheckError(
            Failure(
                f"no result after {timeout_s:.0f} s: try a model with fewer layers of the same "
                "kind, or allow more time"
            )
        ) from error


def _describe_exit(done: subprocess.CompletedProcess[str]) -> Failure:
    """Describe the end of a process that left no answer."""
    status = done.returncode
    cause = f"exit status {status}" if status >= 0 else f"signal {-status}"
    text = _for_users(done.stderr[-8000:]).strip()
    lines = text.splitlines()[-1:]
    return Failure(": ".join([f"the process was ended by {cause}", *lines]), details=text)


def _forward(text: str) -> None:
    """Write the child's stderr to ours."""
    if text := _for_users(text).rstrip():
        print(text, file=sys.stderr)


def _for_users(text: str) -> str:
    """Strip the rank that torch puts in front of each line, and C++ warnings on fake tensors."""
    text = re.sub(r"^\[rank\d+\]: ?", "", text, flags=re.MULTILINE)
    return re.sub(r"^\[W.*data pointer of FakeTensor.*\n?", "", text, flags=re.MULTILINE)


def _environment() -> dict[str, str]:
    # The child must find modules where this process does. An empty entry, the working folder, is
    # left out: a folder in it may have the name of a module.
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
