"""The process with the stand-ins: see ``launch``."""

from __future__ import annotations

import ctypes
import pickle
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from .._torch.no_gpu.stand_ins import DeviceProperties, install, listen, replace
from ..ops import host_copy
from ..params import check
from .gpus import GPUS, has_float8
from .recorder import Recorder


def main(library: str, exchange: str) -> None:
    """Do what the file ``exchange`` says, and write the result there."""
    path = Path(exchange)
    sys.path[:], function, device, args = pickle.loads(path.read_bytes())
    # Of fake tensors, and of caches that are off.
    warnings.filterwarnings("ignore", "dynamo_pgo force disabled|Accessing the data pointer")
    recorder = Recorder()
    install(GPUS[device], recorder)
    listener = listen(ctypes.CDLL(library), recorder.stream_asked)
    replace(host_copy, register_work=recorder.register)
    replace(check, device_fault=_device_fault(GPUS[device]))
    module, _, name = function.partition(":")
    result = getattr(import_module(module), name)(recorder, *args)
    path.write_bytes(pickle.dumps(result))
    del listener


def _device_fault(device: DeviceProperties) -> Callable[[str, str], str | None]:
    """Return what tells why a device computes no fp8, without trying it on the device."""
    fault = None if has_float8(device) else f"{device.name} has no products in fp8"
    return lambda device_type, recipe: fault
