"""Runs functions in a process that has a stand-in for a GPU.

    this process                        child
    call("module:function", device, ..) ──► no_gpu.so, torch, stand-ins ──► function(recorder, ..)
                                        ◄── what it returns, or the traceback of what it raises

The stand-ins change torch for good, and C++ has to be loaded before torch: hence a process of its
own. Arguments and results are pickled.
"""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from .._torch.no_gpu.build import build, torch_library
from .._torch.no_gpu.stand_ins import check_versions

_BOOT = """
import ctypes, sys
for path in sys.argv[1:3]:
    ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
from graphshard.check.child import main
main(sys.argv[2], sys.argv[3])
"""


class CheckError(RuntimeError):
    """Error of a function that raised in the child; the message is its traceback."""


def obstacle() -> str:
    """Return why no GPU can be stood in for on this machine; "" if one can."""
    if find_spec("triton") is None:
        return "needs triton: pip install triton==3.7.1"
    if torch.version.cuda is not None:
        return "needs a CPU build of torch, in an environment of its own"
    try:
        check_versions()
    except RuntimeError as error:
        return str(error)
    return ""


def call(function: str, device: str, *args: Any, timeout_s: float = 600.0) -> Any:
    """Return ``function(recorder, *args)``, called in a new process.

    Args:
        function: "module:name", at the top level of the module.
        device: one of ``graphshard.check.gpus.GPUS``.

    Raises:
        CheckError: the function raised, or the process ended.
        RuntimeError: there is no C++ compiler, or another ``obstacle``.
    """
    if fault := obstacle():
        raise RuntimeError(fault)
    with tempfile.TemporaryDirectory() as folder:
        exchange = Path(folder) / "exchange"
        exchange.write_bytes(pickle.dumps((sys.path, function, device, args)))
        libraries = [str(torch_library()), str(build())]
        command = [sys.executable, "-c", _BOOT, *libraries, str(exchange)]
        done = subprocess.run(
            command, stderr=subprocess.PIPE, text=True, timeout=timeout_s, env=_environment()
        )
        if done.returncode:
            # torch writes the rank in front of each line.
            text = re.sub(r"^\[rank\d+\]: ", "", done.stderr[-8000:], flags=re.MULTILINE)
            if done.returncode < 0:
                text += f"\nthe process was ended by signal {-done.returncode}"
            raise CheckError(text.strip() or f"exit status {done.returncode}")
        return pickle.loads(exchange.read_bytes())


def _environment() -> dict[str, str]:
    # Where this process found modules, the child finds them; its own folder comes last, where a
    # folder may have a module's name.
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
