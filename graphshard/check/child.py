"""Entry point of the child process that simulates a GPU; see ``launch``."""

from __future__ import annotations

import ctypes
import pickle
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from .._torch.no_gpu.stand_ins import DeviceProperties, install, listen, replace
from ..ops import host_copy
from ..params import checks
from .failure import Result, describe_failure
from .gpus import GPUS, has_float8
from .recorder import Recorder


def main(library: str, request: str, answer: str) -> None:
    """Call the function that ``request`` names and write its result or error to ``answer``."""
    sys.path[:], *call = pickle.loads(Path(request).read_bytes())
    # Expected here: fake tensors have no data, and caches are off.
    warnings.filterwarnings("ignore", "dynamo_pgo force disabled|Accessing the data pointer")
    try:
        written = pickle.dumps(Result(_run(library, *call)))
    except (Exception, SystemExit) as error:
        written = pickle.dumps(describe_failure(error))
    Path(answer).write_bytes(written)


def _run(library: str, function: str, device: str, args: Sequence[Any]) -> Any:
    """Install the stand-ins, call the function and return its result."""
    recorder = Recorder()
    install(GPUS[device], recorder)
    listener = listen(ctypes.CDLL(library), recorder.stream_asked)
    replace(host_copy, register_work=recorder.register)
    replace(checks, device_fault=_device_fault(GPUS[device]))
    module, _, name = function.partition(":")
    result = getattr(import_module(module), name)(recorder, *args)
    del listener
    return result


def _device_fault(device: DeviceProperties) -> Callable[[str, str], str | None]:
    """Return a ``device_fault`` that looks up fp8 support instead of trying it on the device."""
    fault = None if has_float8(device) else f"{device.name} has no products in fp8"
    return lambda device_type, recipe: fault
