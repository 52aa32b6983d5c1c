"""Record the actions of generated code while it runs on fake tensors.

    generated code ──► operators, kernels, allocations ──► Recorder ──► Allocate, Work, Record, ..
                       streams, events (``no_gpu.cpp``) ──►

A block is a tensor's storage. It ends when its last reference is gone or its size changes; both are
checked before every action.

[Note: lifetimes] How a collective's memory stays alive while it runs. Line numbers refer to
comments in ProcessGroupNCCL.hpp, torch 2.13; Functional.cpp is from main.

- ``all_gather_into_tensor`` and ``reduce_scatter_tensor`` of one tensor are coalesced collectives
  of a list of one (Functional.cpp), so they run ``collectiveCoalesced``, 1173, instead of
  ``collective``.
- The group's stream waits for the current stream. The work stashes its inputs,
  ``stashed_for_allocator_safety_``, 486-495, and does not call ``record_stream``; before this was
  the default, ``TORCH_NCCL_AVOID_RECORD_STREAMS`` requested it, 182-189.
- The work is registered for each output. ``wait_tensor`` makes the stream that is current at that
  time wait for the work, and empties the stash. After the wait, the allocator may reuse the memory,
  and the result is safe to use on that stream only.
- Without a wait, the watchdog moves the stash to a shelf once the work is done, and the group's
  next call empties the shelf: ``shelvesToUnstash_``, 1426-1432. The recorder instead keeps the
  memory of such a collective until ``clear``.
- Host copies keep their tensors alive in the same way (``graphshard.ops.host_copy``).
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .._torch.no_gpu.operators import (
    DispatchMode,
    Operator,
    WeakStorage,
    is_allocation,
    is_dense,
    is_non_blocking,
    is_view,
    num_kernels,
    run_on_streams,
    tensors_in,
    written_in,
)
from .._torch.tensors import OpOverload, base_name, is_traceable_wrapper_subclass
from ..ops import host_copy
from ..ops.library import implementation_of
from .actions import (
    HOST,
    Action,
    Allocate,
    Free,
    GraphCall,
    Launch,
    Record,
    RecordStream,
    WaitEvent,
    Work,
)

COMPUTE = "compute"  # the stream that is current when training begins


@dataclass(frozen=True)
class _Block:
    number: int
    storage: WeakStorage
    home: str  # stream on which it was allocated


class _InFlight(NamedTuple):
    call: GraphCall
    number: int  # index of the launch in ``call``
    wait: Callable[[], object]  # makes the current stream wait, and frees tensors kept alive


class Recorder:
    """A recorder of compiled kernels and graphs and, inside ``recording``, of all actions."""

    def __init__(self) -> None:
        self._is_recording = False
        self.clear()

    def clear(self) -> None:
        self.actions: list[Action] = []
        self.kernels: list[tuple[str, str]] = []  # name and source of each Triton kernel
        self.codes: list[str] = []  # source of each graph
        self.calls: list[GraphCall] = []
        self._blocks: dict[int, _Block] = {}
        self._num_blocks = self._num_events = 0
        self._in_flight: dict[int, list[_InFlight]] = {}
        self._call = GraphCall()  # collects launches outside of graphs; not one of ``calls``
        self._pinned: dict[int, WeakStorage] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._is_recording = True
        try:
            with _Operators(self):
                yield
        finally:
            self._is_recording = False

    def see(self, tensors: Iterable[torch.Tensor]) -> None:
        # Tensors that exist when recording begins have no recorded allocation.
        for tensor in tensors:
            self._block(tensor)

    # --- called when code is generated and run: see ``no_gpu.stand_ins.install`` ----------------

    def kernel_made(self, name: str, source: str) -> None:
        self.kernels.append((name, source))

    def graph_made(self, source: str) -> None:
        self.codes.append(source)

    def graph_runs(self, call: Callable[..., Any], arguments: Any) -> Any:
        if not self._is_recording:
            return call(arguments)
        self._free()
        blocks = tuple({self._block(tensor) for tensor in tensors_in([arguments])})
        self._call, start = GraphCall(arguments=blocks), len(self.actions)
        self.calls.append(self._call)
        outputs = call(arguments)
        self._free()
        self._call.actions = (start, len(self.actions))
        self._call = GraphCall()
        return outputs

    def kernel_runs(self, name: str, source: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_recording:
            return
        # A kernel reads its ``in_ptr``, writes its ``out_ptr``, and does both to ``in_out_ptr``. A
        # kernel of the user may do both to any tensor.
        names = _parameters(source) or ["in_out_ptr"] * len(arguments)
        pairs = [(n, a) for n, a in zip(names, arguments) if isinstance(a, torch.Tensor)]
        reads = [a for n, a in pairs if not n.startswith("out_ptr")]
        writes = [a for n, a in pairs if "out_ptr" in n]
        self.work(name, reads, writes, kernels=1)

    def host_kernel_runs(self, types: list[str], arguments: tuple[Any, ...]) -> None:
        """Record the call of a host kernel; ``types`` are C++ argument types."""
        if not self._is_recording:
            return
        pairs = [(t, a) for t, a in zip(types, arguments) if isinstance(a, torch.Tensor)]
        written = [tensor for kind, tensor in pairs if not kind.startswith("const")]
        self.work("a host kernel", [tensor for _, tensor in pairs], written, HOST)

    def pinned(self, tensor: torch.Tensor) -> None:
        """Remember a new pinned tensor: copies to and from unpinned memory block the host."""
        storage = WeakStorage(tensor)
        self._pinned[storage.address] = storage

    def stream_asked(self, what: str, event: int, stream: int) -> None:
        if not self._is_recording:
            return
        match what:
            case "record":
                self.actions.append(Record(event, stream_name(stream)))
            case "wait":
                self.actions.append(WaitEvent(event, stream_name(stream)))
            case "synchronize_event":
                self.actions.append(WaitEvent(event, HOST))
            case "synchronize_stream":
                self._host_waits(what, [stream_name(stream)])
            case _:
                self.synchronized()

    def synchronized(self) -> None:
        if self._is_recording:
            streams = {action.stream for action in self.actions if isinstance(action, Work)}
            self._host_waits("synchronize_device", sorted(streams - {HOST}))

    def _host_waits(self, name: str, streams: Iterable[str]) -> None:
        # Record a single wait of the host, for all work issued to ``streams`` so far.
        for stream in streams:
            self._order(stream, name)
        self._order(name, HOST)
        self.actions.append(Work(name, HOST, blocks_host=True))

    # --- actions -------------------------------------------------------------------------------

    def work(
        self,
        name: str,
        reads: Iterable[torch.Tensor],
        writes: Iterable[torch.Tensor],
        stream: str | None = None,
        kernels: int = 0,
        blocks_host: bool = False,
    ) -> None:
        self._free()
        read, written = (tuple(dict.fromkeys(map(self._block, side))) for side in (reads, writes))
        stream = stream or current_stream()
        self.actions.append(Work(name, stream, read, written, kernels, blocks_host))

    def _block(self, tensor: torch.Tensor) -> int:
        storage = WeakStorage(tensor)
        known = self._blocks.get(storage.address)
        if known is None:
            home = HOST if tensor.device.type == "cpu" else current_stream()
            return self._new_block(storage, home)
        return known.number

    def _new_block(self, storage: WeakStorage, home: str) -> int:
        self._blocks[storage.address] = _Block(self._num_blocks, storage, home)
        self.actions.append(Allocate(self._num_blocks, storage.num_bytes, home))
        self._num_blocks += 1
        return self._num_blocks - 1

    def _free(self) -> None:
        """Record the end of blocks that have no references left, or that ``resize_`` changed."""
        resized = []
        for address, block in list(self._blocks.items()):
            is_gone = block.storage.is_gone()
            if is_gone or block.storage.take_in_size():
                self.actions.append(Free(self._blocks.pop(address).number))
                resized += [] if is_gone else [block]
        for block in resized:
            home = block.home if block.home == HOST else current_stream()
            self._new_block(block.storage, home)

    # --- operators -----------------------------------------------------------------------------

    def operator(self, op: Operator, args: Sequence[object], kwargs: dict[str, object]) -> object:
        self._free()
        special = _SPECIAL.get(str(op))
        if special is not None:
            return special(self, op, *args, **kwargs)
        if str(op).startswith("streams."):  # from user code, traced into the graph
            return run_on_streams(op, args, kwargs)
        if isinstance(op, OpOverload) and op.namespace == "graphshard":
            return self._own(op, args, kwargs)
        outputs = op(*args, **kwargs)
        if str(op).startswith("_c10d_functional."):
            self._launch(str(op), args, outputs)
            return outputs
        if is_allocation(op):
            for tensor in tensors_in([outputs]):
                self._block(tensor)
                if kwargs.get("pin_memory"):
                    self.pinned(tensor)
            return outputs
        inputs = list(tensors_in([args, kwargs]))
        written = list(written_in(op, args, kwargs))
        made = [] if is_view(op) else list(tensors_in([outputs]))
        if made or written:
            self._compute(op, args, kwargs, inputs, [*written, *made])
        return outputs

    def _compute(
        self,
        op: Operator,
        args: Sequence[object],
        kwargs: dict[str, object],
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
    ) -> None:
        """Record a non-view operator on the host or device, or a copy between them."""
        # Only copies move a 0-dim CPU tensor to the device; other operators read it as a scalar.
        is_copy = base_name(op) in ("copy_", "_to_copy")
        on_host = [
            t for t in (*inputs, *outputs) if t.device.type == "cpu" and (t.dim() or is_copy)
        ]
        on_device = [t for t in (*inputs, *outputs) if t.device.type != "cpu"]
        if not on_device:
            self.work(str(op), inputs, outputs, HOST)
        elif on_host and isinstance(op, OpOverload):  # higher-order ops: only RNG states on host
            is_async = is_non_blocking(op, args, kwargs)
            if is_async and base_name(op) == "_to_copy":
                # The result is pinned (aten/src/ATen/native/TensorConversions.cpp).
                for tensor in outputs:
                    if tensor.device.type == "cpu":
                        self.pinned(tensor)
            is_async = is_async and all(map(self._is_pinned, on_host))
            self.work(str(op), inputs, outputs, blocks_host=not is_async)
            if not is_async:
                self._order(current_stream(), HOST)
        else:
            self.work(str(op), inputs, outputs, kernels=num_kernels(op, args, kwargs))

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        pinned = self._pinned.get(WeakStorage(tensor).address)
        return pinned is not None and not pinned.is_gone()

    def _launch(self, name: str, args: Sequence[object], outputs: object) -> None:
        inputs, results = list(tensors_in(args)), list(tensors_in([outputs]))
        sent = results if name in _SEND_COPIES else inputs
        for tensor in sent:
            if not is_dense(tensor):  # as in ProcessGroupNCCL.cpp
                raise ValueError(
                    f"{name}: a tensor of shape {list(tensor.shape)} has strides "
                    f"{list(tensor.stride())}, but NCCL requires dense tensors"
                )
            # Functions for one tensor send complex numbers as pairs of real ones.
            if tensor.is_complex() and "_coalesced" in name:
                raise ValueError(f"{name}: NCCL cannot send a tensor of {tensor.dtype}")
        for tensor in (*inputs, *results):
            self._block(tensor)
        group = str(getattr(args[-1], "group_name", args[-1]))  # the group itself or its name
        number = self._call.launch(Launch(name, group))
        stream = f"nccl {group}"
        self._order(current_stream(), stream)
        self.work(name, inputs, results, stream)
        event, kept = self._record(stream), [*inputs, *results]

        def wait() -> None:
            kept.clear()
            self.actions.append(WaitEvent(event, current_stream()))

        for result in results:
            self._add_in_flight(result, number, wait)

    def _add_in_flight(self, result: torch.Tensor, number: int, wait: Callable[[], object]) -> None:
        launch = _InFlight(self._call, number, wait)
        self._in_flight.setdefault(self._block(result), []).append(launch)

    def _wait(self, op: Operator, tensor: torch.Tensor) -> torch.Tensor:
        for launch in self._in_flight.pop(self._block(tensor), ()):
            launch.call.wait(launch.number)
            launch.wait()
        return tensor

    def _own(self, op: OpOverload, args: Sequence[object], kwargs: dict[str, object]) -> object:
        if op in (host_copy.copy_to_device, host_copy.copy_to_host):
            self._call.launch(Launch(str(op), ""))
        with _Operators(self):
            return implementation_of(op)(*args, **kwargs)

    def register(self, tensor: torch.Tensor, work: dist.Work) -> None:
        """Make the next wait for ``tensor`` wait for ``work``, the most recent launch."""
        self._add_in_flight(tensor, len(self._call.launches) - 1, work.wait)

    def _record_stream(self, op: Operator, tensor: torch.Tensor, stream: torch.Stream) -> None:
        self.actions.append(RecordStream(self._block(tensor), stream_name(stream.stream_id)))

    def _synchronize(self, op: Operator, *device: object) -> None:
        self.synchronized()

    def _record(self, stream: str) -> int:
        self._num_events -= 1  # negative, unlike the events of ``no_gpu.cpp``
        self.actions.append(Record(self._num_events, stream))
        return self._num_events

    def _order(self, first: str, second: str) -> None:
        self.actions.append(WaitEvent(self._record(first), second))


# Operators that send copies of their inputs, in place (Functional.cpp).
_SEND_COPIES = frozenset(
    f"_c10d_functional.{name}.default"
    for name in ("all_reduce", "all_reduce_coalesced", "broadcast")
)

_SPECIAL: dict[str, Callable[..., object]] = {
    "_c10d_functional.wait_tensor.default": Recorder._wait,
    "aten.record_stream.default": Recorder._record_stream,
    "streams.synchronize_device.default": Recorder._synchronize,
}


class _Operators(DispatchMode):
    supports_higher_order_operators = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_traceable_wrapper_subclass, tensors_in([args, kwargs]))):
            return NotImplemented  # lets DTensor run the operator on its local shard
        return self._recorder.operator(func, args, kwargs or {})


def stream_name(number: int) -> str:
    """Return the name of the stream that has this number in ``no_gpu.cpp``."""
    return f"stream {number}" if number else COMPUTE


def current_stream() -> str:
    """Return the name of this thread's current stream."""
    return stream_name(torch.accelerator.current_stream("cuda:0").stream_id)


@functools.cache
def _parameters(source: str) -> tuple[str, ...]:
    """Return the parameter names of a kernel from Inductor, or () for a user's own kernel."""
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
    kernels = [f for f in functions if f.name.startswith("triton_")]
    return tuple(argument.arg for kernel in kernels for argument in kernel.args.args)
