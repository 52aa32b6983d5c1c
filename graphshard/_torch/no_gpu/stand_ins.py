"""Replacements for a CUDA device, its driver and its allocator in this process.

With them, Inductor and Triton compile for the device, and the generated code runs on fake tensors.
``no_gpu.cpp``, which must be loaded before torch, makes autograd accept ``cuda``, with streams and
events that have no effect. `install` replaces the rest permanently: the process must not be used
for anything else afterwards. This module contains all replacements of Python code in torch and
Triton.

Relies on torch 2.13 and Triton 3.7.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils._triton as triton_utils
from torch._dynamo import device_interface
from torch._functorch import config as functorch_config
from torch._inductor import async_compile, codecache
from torch._inductor import config as inductor_config
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import hints, triton_helpers
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import proxy_tensor

TORCH_VERSIONS = ("2.13",)
TRITON_VERSIONS = ("3.7",)


@dataclass(frozen=True)
class DeviceProperties:
    """Device properties that Inductor reads, as from ``torch.cuda.get_device_properties``."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    total_memory: int
    L2_cache_size: int
    shared_memory_per_block_optin: int  # maximum in bytes, for a kernel that opts in
    shared_memory_per_multiprocessor: int
    shared_memory_per_block: int = 48 << 10
    warp_size: int = 32
    regs_per_multiprocessor: int = 65536
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    gcnArchName: str = ""
    is_integrated: int = 0

    @property
    def capability(self) -> int:
        """The compute capability as one number: 90 for 9.0."""
        return 10 * self.major + self.minor


def check_versions() -> None:
    """Raise RuntimeError if the installed torch or Triton cannot simulate a GPU."""
    import triton

    for name, version, known in (
        ("torch", torch.__version__, TORCH_VERSIONS),
        ("triton", triton.__version__, TRITON_VERSIONS),
    ):
        if not version.startswith(known):
            raise RuntimeError(
                f"cannot simulate a GPU with {name} {version}, because the simulation replaces "
                f"internals of {name}: install {name} {' or '.join(known)}"
            )


StreamListener = Callable[[str, int, int], None]  # operation, ID of the event, ID of the stream


def listen(library: ctypes.CDLL, listener: StreamListener) -> object:
    """Call ``listener`` for every stream or event operation while the returned object lives."""
    kind = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64)
    callback = kind(lambda what, event, stream: listener(what.decode(), event, stream))
    library.graphshard_listen(callback)
    return callback


def install(device: DeviceProperties, hooks: Any) -> None:
    """Simulate a device in this process, and report the actions of generated code to ``hooks``.

    ``hooks`` has the methods ``kernel_made``, ``kernel_runs``, ``host_kernel_runs``, ``pinned``,
    ``synchronized``, ``graph_made`` and ``graph_runs`` of ``graphshard.check.recorder.Recorder``.
    """
    check_versions()
    # This logger prints tracebacks even of errors that are raised anyway.
    logging.getLogger(FakeTensorMode.__module__).setLevel(logging.CRITICAL)
    _stand_in_for_torch_cuda(device)
    _stand_in_for_kernel_flag()
    _stand_in_for_waiting(hooks)
    _stand_in_for_dynamo(device)
    _stand_in_for_triton(device)
    _stand_in_for_allocation(hooks)
    _stand_in_for_scaled_mm()
    _stand_in_for_cudnn()
    _stand_in_for_running(hooks)


def _stand_in_for_torch_cuda(device: DeviceProperties) -> None:
    """Replace functions that raise or find no device in the CPU build, most in ``torch.cuda``."""
    properties = types.SimpleNamespace(**asdict(device))
    answers: dict[str, Any] = {
        "is_available": True,
        "is_bf16_supported": True,
        "device_count": 1,
        "current_device": 0,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "get_device_name": device.name,
        "get_device_properties": properties,
        "get_device_capability": (device.major, device.minor),
        "memory_allocated": 0,
        "memory_reserved": 0,
        "mem_get_info": (device.total_memory, device.total_memory),
        # There is nothing to initialize or move.
        "_lazy_init": None,
        "set_device": None,
        "manual_seed": None,
        "set_rng_state": None,
    }
    replace(torch.cuda, **{name: _returns(answer) for name, answer in answers.items()})
    replace(torch.cuda, get_rng_state=lambda *args: torch.zeros(16, dtype=torch.uint8))
    replace(torch.cuda, Stream=_Stream, Event=_Event, stream=_in_stream)
    replace(torch.cuda, current_stream=lambda *args: torch.accelerator.current_stream("cuda:0"))
    # Otherwise a fake tensor would first create a context on its device.
    replace(FakeTensorMode, avoid_device_init=property(lambda mode: True))
    # Tracing evaluates operators on constants of up to this many elements, on the device.
    replace(proxy_tensor, CONSTANT_NUMEL_LIMIT=-1)
    # Generated code reads the current stream, and checks that addresses are multiples of 16.
    replace(torch._C, _cuda_getCurrentRawStream=_returns(0))
    replace(torch._C._dynamo.guards, assert_alignment=_returns(None))


def _stand_in_for_kernel_flag() -> None:
    """Give each thread its own ``FakeTensorMode.in_kernel_invocation``."""

    # Backward runs nodes of the CPU and of the device in two threads. While one of them runs a
    # kernel, fake tensors would report the device "meta" to the other.
    class Flag(threading.local):
        value = False

    flag = Flag()

    def put(mode: FakeTensorMode, value: bool) -> None:
        flag.value = value

    replace(FakeTensorMode, in_kernel_invocation=property(lambda mode: flag.value, put))


def _stand_in_for_waiting(hooks: Any) -> None:
    """Replace device synchronization with a callback, because there is nothing to wait for."""
    for module in (torch.cuda, torch.accelerator):
        # Each module gets its own function, because Dynamo looks up handlers by function.
        replace(module, synchronize=lambda device=None: hooks.synchronized())


class _Stream(torch.Stream):
    """Stub of ``torch.cuda.Stream``, which eager FSDP2 uses; ``no_gpu.cpp`` assigns its ID."""

    def __new__(cls, device: object = None, priority: int = 0) -> _Stream:
        return super().__new__(cls, "cuda:0")


class _Event(torch.Event):
    def __new__(cls, *args: object, **kwargs: object) -> _Event:
        return super().__new__(cls, "cuda:0")


def _in_stream(stream: torch.Stream | None) -> AbstractContextManager[object]:
    # ``torch.cuda.stream(None)`` has no effect.
    return nullcontext() if stream is None else stream


def replace(owner: Any, **values: Any) -> None:
    for name, value in values.items():
        setattr(owner, name, value)


def _returns(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _stand_in_for_dynamo(device: DeviceProperties) -> None:
    """Register a stub of ``CudaInterface``.

    Dynamo and Inductor query the device's runtime through it.
    """
    properties = types.SimpleNamespace(**asdict(device))

    class Interface(device_interface.CudaInterface):
        class Worker(device_interface.CudaInterface.Worker):
            set_device = staticmethod(_returns(None))
            current_device = staticmethod(_returns(0))
            get_device_properties = staticmethod(_returns(properties))

    answers = {
        "is_available": True,
        "is_bf16_supported": True,
        "is_dtype_supported": True,
        "is_triton_capable": True,
        "raise_if_triton_unavailable": None,
        "current_device": 0,
        "device_count": 1,
        "set_device": None,
        "synchronize": None,
        "get_compute_capability": device.capability,
        "get_device_properties": properties,
        "get_raw_stream": 0,
        "memory_allocated": 0,
    }
    replace(Interface, **{name: staticmethod(_returns(a)) for name, a in answers.items()})
    device_interface.init_device_reg()
    for name in ("cuda", "cuda:0"):
        device_interface.device_interfaces[name] = Interface


def _stand_in_for_triton(device: DeviceProperties) -> None:
    """Replace Triton's driver, which would load libcuda; disable settings that need a device."""
    import triton
    from triton.backends.compiler import GPUTarget

    class Driver:
        get_current_target = staticmethod(
            _returns(GPUTarget("cuda", device.capability, device.warp_size))
        )
        get_current_device = get_current_stream = staticmethod(_returns(0))
        get_active_torch_device = staticmethod(lambda: torch.device("cuda:0"))
        is_active = staticmethod(_returns(True))

    triton.runtime.driver.set_active(Driver())
    triton_helpers.set_driver_to_gpu = _returns(None)
    # Clear results that were cached while no device existed.
    for function in vars(triton_utils).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()
    hints.DeviceProperties.create.cache_clear()
    # Neither benchmarks nor constant folding can run on the device, and its random generators have
    # no state. Other processes cannot compile, because they lack these replacements.
    functorch_config.graphsafe_rng_functionalization = False
    inductor_config.compile_threads = 1
    inductor_config.force_disable_caches = True
    inductor_config.shape_padding = False
    inductor_config.max_autotune = False
    inductor_config.joint_graph_constant_folding = False
    inductor_config.use_static_triton_launcher = False


def _stand_in_for_allocation(hooks: Any) -> None:
    """Replace the C++ functions that allocate, pin or view, which do not support fake tensors."""

    def empty(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device="cuda:0")

    def empty_pinned(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty_strided(size, stride, dtype=dtype)
        hooks.pinned(made)
        return made

    def view(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
        return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)

    def pin_memory(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
        copy = tensor.clone()
        hooks.pinned(copy)
        return copy

    replace(torch.Tensor, pin_memory=pin_memory)
    guards = torch._C._dynamo.guards
    replace(guards, _empty_strided_cuda=empty, _reinterpret_tensor=view)
    replace(guards, _empty_strided_cpu_pinned=empty_pinned)


def _stand_in_for_scaled_mm() -> None:
    """Register ``_scaled_mm.out`` for fake tensors, implemented by the variant without ``out``."""

    # That variant raises for layouts or sizes that cuBLASLt would reject
    # (torch/_meta_registrations.py): for fp8, the first matrix must be row-major and the second
    # column-major ("TN"), and sizes and addresses must be multiples of 16 bytes (cuBLAS
    # documentation, ``cublasLtMatmul``).
    def scaled_mm(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        for name, matrix in zip(("self", "mat2", "out"), (*args[:2], out)):
            # The storage's address is a multiple of 512.
            offset = matrix.storage_offset() * matrix.element_size()
            if offset % 16:
                raise ValueError(
                    f"_scaled_mm: its argument {name!r} begins at byte {offset} of its storage, "
                    "but cuBLASLt requires a multiple of 16: pass a clone()"
                )
        made = torch.ops.aten._scaled_mm.default(*args, **kwargs)
        assert made.shape == out.shape and made.dtype == out.dtype
        return out

    torch.library.impl("aten::_scaled_mm.out", "Meta")(scaled_mm)


def _stand_in_for_cudnn() -> None:
    """Choose the memory format of a convolution's result as cuDNN would."""
    # The CPU build has no cuDNN, and would choose an implementation without channels-last support
    # (``cudnn_conv_suggest_memory_format`` in aten/src/ATen/native/ConvUtils.h).
    on_cpu = torch._C._conv_determine_backend_memory_format

    def memory_format(
        images: torch.Tensor, weight: torch.Tensor, backend: Any
    ) -> torch.memory_format:
        if images.device.type == "cpu":
            return on_cpu(images, weight, backend)
        wanted = map(suggest_memory_format, (images, weight))
        return next((f for f in wanted if f != torch.contiguous_format), torch.contiguous_format)

    replace(torch._C, _conv_determine_backend_memory_format=memory_format)


def _stand_in_for_running(hooks: Any) -> None:
    """Report kernels, launches and graph calls to ``hooks``; run no kernels."""

    # Triton kernels are reported as source code. Host kernels do not run either: they would read
    # memory that fake tensors do not have.
    class Kernel:
        def __init__(self, name: str, source: str) -> None:
            self._name, self._source = name, source

        def run(self, *arguments: Any, **options: Any) -> None:
            hooks.kernel_runs(self._name, self._source, arguments)

    def triton(self: Any, name: str, source: str, device_str: str = "cuda") -> Kernel:
        hooks.kernel_made(name, source)
        return Kernel(name, source)

    def cpp(self: Any, argtypes: list[str], source_code: str) -> Callable[..., None]:
        return lambda *arguments: hooks.host_kernel_runs(argtypes, arguments)

    compile_to_module = GraphLowering.compile_to_module

    def recorded(self: GraphLowering) -> Any:
        module: Any = compile_to_module(self)
        hooks.graph_made(Path(module.__file__).read_text(encoding="utf-8"))
        call = module.call
        module.call = lambda arguments: hooks.graph_runs(call, arguments)
        return module

    replace(async_compile.AsyncCompile, triton=triton, cpp_pybinding=cpp)
    replace(GraphLowering, compile_to_module=recorded)


def compile_kernel(name: str, source: str) -> list[Any]:
    """Compile a Triton kernel as Inductor does; return metadata of each compiled configuration."""
    kernel: Any = codecache._load_triton_kernel_from_source(name, source)
    kernel.precompile(warm_cache_only=True)
    return [result.kernel.metadata for result in kernel.compile_results]
