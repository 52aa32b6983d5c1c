"""Replace a CUDA device, its driver and its allocator in this process, so that Inductor and Triton
compile for the device and the generated code runs over fake tensors.

``no_gpu.cpp`` was loaded before torch: autograd, streams and events of ``cuda`` work, and do
nothing. `install` puts the rest in place, for good: this process can do nothing else afterwards.
Every function that is replaced is named here, with what it would have asked of the device. Read in
torch 2.13 and Triton 3.7.
"""

from __future__ import annotations

import ctypes
import logging
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
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx.experimental import proxy_tensor

__all__ = ["DataDependentOutputException", "DynamicOutputShapeException"]

TORCH_VERSIONS = ("2.13",)
TRITON_VERSIONS = ("3.7",)


@dataclass(frozen=True)
class DeviceProperties:
    """Properties of a device that Inductor reads, as of ``torch.cuda.get_device_properties``.

    Attributes:
        shared_memory_per_block_optin: bytes of shared memory that a kernel may ask for.
    """

    name: str
    major: int
    minor: int
    multi_processor_count: int
    total_memory: int
    L2_cache_size: int
    shared_memory_per_block_optin: int
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
        """The compute capability as one number: 90 of 9.0."""
        return 10 * self.major + self.minor


def check_versions() -> None:
    """
    Raises:
        RuntimeError: the stand-ins are not known to serve this torch or Triton.
    """
    import triton

    for name, version, known in (
        ("torch", torch.__version__, TORCH_VERSIONS),
        ("triton", triton.__version__, TRITON_VERSIONS),
    ):
        if not version.startswith(known):
            raise RuntimeError(
                f"{name} {version}: a GPU can be stood in for with {name} {' or '.join(known)} "
                "alone, whose internals this replaces"
            )


StreamListener = Callable[[str, int, int], None]
"""Called with what is asked of a stream, the event's number, and the stream's."""


def listen(library: ctypes.CDLL, listener: StreamListener) -> object:
    """Tell ``listener`` what is asked of streams.

    Returns:
        What has to be kept as long as it listens.
    """
    kind = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64)
    callback = kind(lambda what, event, stream: listener(what.decode(), event, stream))
    library.graphshard_listen(callback)
    return callback


class Hooks:
    """Called while generated code is made and runs. Each does nothing until it is set."""

    def kernel_made(self, name: str, source: str) -> None:
        """Inductor has written a Triton kernel."""

    def kernel_runs(self, name: str, source: str, arguments: tuple[Any, ...]) -> None:
        """The generated code launches a kernel."""

    def host_kernel_runs(self, types: list[str], arguments: tuple[Any, ...]) -> None:
        """The generated code calls a kernel of the host; ``types`` are C++ types of arguments."""

    def pinned(self, tensor: torch.Tensor) -> None:
        """A tensor's memory on the host is locked, as copies that the host does not wait for need
        it."""

    def synchronized(self) -> None:
        """The host waits for all that the device has been asked for."""

    def graph_made(self, source: str) -> None:
        """Inductor has written the code of a graph."""

    def graph_runs(self, call: Callable[..., Any], arguments: Any) -> Any:
        """The generated code of a graph is called."""
        return call(arguments)


def install(device: DeviceProperties, hooks: Hooks) -> None:
    """Put all stand-ins in place."""
    check_versions()
    # It writes tracebacks of errors that are raised, too.
    logging.getLogger(FakeTensorMode.__module__).setLevel(logging.CRITICAL)
    _stand_in_for_torch_cuda(device)
    _stand_in_for_waiting(hooks)
    _stand_in_for_dynamo(device)
    _stand_in_for_triton(device)
    _stand_in_for_allocation(hooks)
    _stand_in_for_scaled_mm()
    _stand_in_for_cudnn()
    _stand_in_for_running(hooks)


def _stand_in_for_torch_cuda(device: DeviceProperties) -> None:
    """``torch.cuda``: the CPU build's functions raise, or say that there is no device."""
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
        # Nothing is initialised or moved.
        "_lazy_init": None,
        "set_device": None,
        "manual_seed": None,
        "set_rng_state": None,
    }
    replace(torch.cuda, **{name: _returns(answer) for name, answer in answers.items()})
    replace(torch.cuda, get_rng_state=lambda *args: torch.zeros(16, dtype=torch.uint8))
    replace(torch.cuda, Stream=_Stream, Event=_Event, stream=_in_stream)
    replace(torch.cuda, current_stream=lambda *args: torch.accelerator.current_stream("cuda:0"))
    # A fake tensor would make a context on its device first.
    replace(FakeTensorMode, avoid_device_init=property(lambda mode: True))
    # A trace computes what it makes of constants, on the device, if they are no larger than this.
    replace(proxy_tensor, CONSTANT_NUMEL_LIMIT=-1)
    # The generated code asks for the stream, and that a tensor's address is a multiple of 16.
    replace(torch._C, _cuda_getCurrentRawStream=_returns(0))
    replace(torch._C._dynamo.guards, assert_alignment=_returns(None))


def _stand_in_for_waiting(hooks: Hooks) -> None:
    """The host's waits for the whole device: there is nothing to wait for, but it is told."""

    for module in (torch.cuda, torch.accelerator):
        # A function for each: Dynamo looks up by it what to trace.
        replace(module, synchronize=lambda device=None: hooks.synchronized())


class _Stream(torch.Stream):
    """A stream as eager FSDP2 makes them; its number is of ``no_gpu.cpp``."""

    def __new__(cls, device: object = None, priority: int = 0) -> _Stream:
        return super().__new__(cls, "cuda:0")


class _Event(torch.Event):
    def __new__(cls, *args: object, **kwargs: object) -> _Event:
        return super().__new__(cls, "cuda:0")


def _in_stream(stream: torch.Stream | None) -> AbstractContextManager[object]:
    """Return a context in which ``stream`` is the current one, if it is not None."""
    return nullcontext() if stream is None else stream


def replace(owner: Any, **values: Any) -> None:
    """Set attributes of a module or class."""
    for name, value in values.items():
        setattr(owner, name, value)


def _returns(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _stand_in_for_dynamo(device: DeviceProperties) -> None:
    """``DeviceInterface``: what Dynamo and Inductor ask of the device's runtime."""
    properties = types.SimpleNamespace(**asdict(device))

    class Worker(device_interface.CudaInterface.Worker):
        set_device = staticmethod(_returns(None))
        current_device = staticmethod(_returns(0))
        get_device_properties = staticmethod(_returns(properties))

    class Interface(device_interface.CudaInterface):
        pass

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
    replace(Interface, Worker=Worker)
    device_interface.init_device_reg()
    for name in ("cuda", "cuda:0"):
        device_interface.device_interfaces[name] = Interface


def _stand_in_for_triton(device: DeviceProperties) -> None:
    """Triton's driver, which would load libcuda to find out for what to compile."""
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
    # What was asked before there was a device.
    for function in vars(triton_utils).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()
    hints.DeviceProperties.create.cache_clear()
    # Nothing may run on the device to be measured or computed, its random generators have no state,
    # and no other process may compile: it would not have these stand-ins.
    functorch_config.graphsafe_rng_functionalization = False
    inductor_config.compile_threads = 1
    inductor_config.force_disable_caches = True
    inductor_config.shape_padding = False
    inductor_config.max_autotune = False
    inductor_config.joint_graph_constant_folding = False
    inductor_config.use_static_triton_launcher = False


def _stand_in_for_allocation(hooks: Hooks) -> None:
    """Inductor's allocations and views, which are C++ that fake tensors do not pass."""

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
    """``_scaled_mm`` into a given tensor takes no fake tensors. The variant without one does, and
    raises where cuBLASLt would refuse layouts or sizes (torch/_meta_registrations.py): for fp8 the
    first matrix has to be row-major and the second one column-major ("TN"), and sizes and addresses
    have to be multiples of 16 bytes (cuBLAS documentation, ``cublasLtMatmul``)."""

    def scaled_mm(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        for matrix in (*args[:2], out):
            # Of the storage, whose address is a multiple of 512.
            offset = matrix.storage_offset() * matrix.element_size()
            if offset % 16:
                raise ValueError(f"matrices must begin at multiples of 16 bytes, not at {offset}")
        made = torch.ops.aten._scaled_mm.default(*args, **kwargs)
        assert made.shape == out.shape and made.dtype == out.dtype
        return out

    torch.library.impl("aten::_scaled_mm.out", "Meta")(scaled_mm)


def _stand_in_for_cudnn() -> None:
    """The layout of what a convolution returns: the CPU build has no cuDNN, and would choose an
    implementation that knows no channels last (``cudnn_conv_suggest_memory_format`` in
    aten/src/ATen/native/ConvUtils.h)."""
    on_cpu = torch._C._conv_determine_backend_memory_format

    def memory_format(
        images: torch.Tensor, weight: torch.Tensor, backend: Any
    ) -> torch.memory_format:
        if images.device.type == "cpu":
            return on_cpu(images, weight, backend)
        wanted = map(suggest_memory_format, (images, weight))
        return next((f for f in wanted if f != torch.contiguous_format), torch.contiguous_format)

    replace(torch._C, _conv_determine_backend_memory_format=memory_format)


def _stand_in_for_running(hooks: Hooks) -> None:
    """Kernels are kept as text, and their launches are told; so are the calls of graphs. Kernels
    of the host, for values that are on it, would read memory that fake tensors do not have."""

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
        hooks.graph_made(Path(module.__file__).read_text())
        call = module.call
        module.call = lambda arguments: hooks.graph_runs(call, arguments)
        return module

    replace(async_compile.AsyncCompile, triton=triton, cpp_pybinding=cpp)
    replace(GraphLowering, compile_to_module=recorded)


def compile_kernel(name: str, source: str) -> list[Any]:
    """Compile a Triton kernel to machine code, as Inductor does before it runs it.

    Returns:
        Triton's metadata of each configuration that compiles.
    """
    kernel: Any = codecache._load_triton_kernel_from_source(name, source)
    kernel.precompile(warm_cache_only=True)
    return [result.kernel.metadata for result in kernel.compile_results]
