"""The process with the stand-ins: see ``launch``."""

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
from ..params import check
from .failure import Result, failure_of
from .gpus import GPUS, has_float8
from .recorder import Recorder


def main(library: str, request: str, answer: str) -> None:
    """Do what the file ``request`` says, and write the result or the error to ``answer``."""
    sys.path[:], *call = pickle.loads(Path(request).read_bytes())
    # Of fake tensors, and of caches that are off.
    warnings.filterwarnings("ignore", "dynamo_pgo force disabled|Accessing the data pointer")
    try:
        written = pickle.dumps(Result(_run(library, *call)))
    except (Exception, SystemExit) as error:
        written = pickle.dumps(failure_of(error))
    Path(answer).write_bytes(written)


def _run(library: str, function: str, device: str, args: Sequence[Any]) -> Any:
    """Put the stand-ins in place, and return what the function returns."""
    recorder = Recorder()
    install(GPUS[device], recorder)
    listener = listen(ctypes.CDLL(library), recorder.stream_asked)
    replace(host_copy, register_work=recorder.register)
    replace(check, device_fault=_device_fault(GPUS[device]))
    module, _, name = function.partition(":")
    result = getattr(import_module(module), name)(recorder, *args)
    del listener
    return result


def _device_fault(device: DeviceProperties) -> Callable[[str, str], str | None]:
    """Return what tells why a device computes no fp8, without trying it on the device."""
    fault = None if has_float8(device) else f"{device.name} has no products in fp8"
    return lambda device_type, recipe: fault
