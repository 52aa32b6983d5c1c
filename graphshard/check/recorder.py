"""Writes down what generated code does while it runs over fake tensors: a list of actions.

    generated code ──► operators, kernels, allocations ──► Recorder ──► Allocate, Work, Record, ..
                       streams, events (``no_gpu.cpp``) ──►

A kernel reads its ``in_ptr`` and writes its ``out_ptr`` arguments; an operator tells by its schema.
A block is a tensor's storage; it is freed when nothing refers to it any more, or its size changes,
which is looked up before every action. Collectives run as in ``torch/csrc/distributed/c10d``: a
stream of the group waits for the current one, and inputs and outputs are kept until somebody waits.

[Note: lifetimes] What keeps the memory of a collective while it runs. Lines are of
ProcessGroupNCCL.hpp in torch 2.13 (in brackets 2.11), whose comments tell what is said here of
ProcessGroupNCCL.cpp; Functional.cpp was read on the main branch. ``all_gather_into_tensor`` and
``reduce_scatter_tensor`` of one tensor are coalesced ones of a list (Functional.cpp), so they go
through ``collectiveCoalesced``, 1173 (1180), and not ``collective``. The group's stream waits for
the current one; inputs are stashed in the work, ``stashed_for_allocator_safety_``, 486-495
(491-500), and there is no ``record_stream``: ``TORCH_NCCL_AVOID_RECORD_STREAMS`` asked for that
before it was the default, 182-189 (181-188). The work is registered for each output.
``wait_tensor`` has the stream that is then current wait for the work's end, and empties the stash.
So the allocator may hand out the memory behind the wait, and the result is safe to use on that
stream alone. Of works that nobody has waited for, the watchdog moves the stash of those that are
done to a shelf, which the next call of the group empties: ``shelvesToUnstash_``, 1426-1432
(1430-1436). That is memory freed later than here, and never earlier than the work's end. A host
copy of this project keeps its tensors in the same way (``graphshard.ops.host_copy``).
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .._torch.no_gpu.kernels import num_kernels
from .._torch.no_gpu.operators import (
    DispatchMode,
    WeakStorage,
    is_allocation,
    is_view,
    run_on_streams,
    tensors_in,
    written_in,
)
from .._torch.no_gpu.stand_ins import Hooks
from .._torch.tensors import OpOverload, argument_names, base_name, is_traceable_wrapper_subclass
from ..ops import host_copy
from ..ops.library import implementation_of
from .actions import HOST, Action, Allocate, Free, Record, RecordStream, WaitEvent, Work
from .in_flight import Launched, Registered
from .runs import GraphRun, Launch

COMPUTE = "compute"
"""The stream that is current when training begins."""


@dataclass(frozen=True)
class _Block:
    """Memory that something refers to."""

    number: int
    storage: WeakStorage
    home: str


class Recorder(Hooks):
    """Kernels and graphs of a process, as they are made; and actions, while it records.

    Attributes:
        actions: in the order in which the host asked for them.
        kernels: name and source of each.
        codes: of each graph.
        runs: of graphs.
    """

    def __init__(self) -> None:
        self._is_recording = False
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        self.actions: list[Action] = []
        self.kernels: list[tuple[str, str]] = []
        self.codes: list[str] = []
        self.runs: list[GraphRun] = []
        self._blocks: dict[int, _Block] = {}
        self._num_blocks = self._num_events = 0
        self._launched: dict[int, list[Launched | Registered]] = {}
        self._run = GraphRun()  # of what is launched outside of graphs: it is not among the runs
        self._pinned: dict[int, WeakStorage] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what is asked of the device meanwhile, in graphs and between them."""
        self._is_recording = True
        try:
            with _Operators(self):
                yield
        finally:
            self._is_recording = False

    def see(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note the memory of tensors that there are when recording begins."""
        for tensor in tensors:
            self._block(tensor)

    # --- what the generated code tells ---------------------------------------------------------

    def kernel_made(self, name: str, source: str) -> None:
        self.kernels.append((name, source))

    def graph_made(self, source: str) -> None:
        self.codes.append(source)

    def graph_runs(self, call: Callable[..., Any], arguments: Any) -> Any:
        if not self._is_recording:
            return call(arguments)
        self._free()
        given = tuple({self._block(tensor) for tensor in tensors_in([arguments])})
        self._run, start = GraphRun(arguments=given), len(self.actions)
        self.runs.append(self._run)
        outputs = call(arguments)
        self._free()
        self._run.actions = (start, len(self.actions))
        self._run = GraphRun()
        return outputs

    def kernel_runs(self, name: str, source: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_recording:
            return
        names = _parameters(source)
        pairs = [(n, a) for n, a in zip(names, arguments) if isinstance(a, torch.Tensor)]
        reads = [a for n, a in pairs if not n.startswith("out_ptr")]
        writes = [a for n, a in pairs if "out_ptr" in n]
        self.work(name, reads, writes, kernels=1)

    def host_kernel_runs(self, types: list[str], arguments: tuple[Any, ...]) -> None:
        if not self._is_recording:
            return
        pairs = [(t, a) for t, a in zip(types, arguments) if isinstance(a, torch.Tensor)]
        written = [tensor for kind, tensor in pairs if not kind.startswith("const")]
        self.work("a kernel of the host", [tensor for _, tensor in pairs], written, HOST)

    def pinned(self, tensor: torch.Tensor) -> None:
        storage = WeakStorage(tensor)
        self._pinned[storage.address] = storage

    def stream_asked(self, what: str, event: int, stream: int) -> None:
        """Take in what ``no_gpu.cpp`` tells."""
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
        """Note that the host waits, once, for all work so far on ``streams``."""
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
        """Note that ``name`` runs on a stream, the current one by default."""
        self._free()
        read, written = (tuple(dict.fromkeys(map(self._block, side))) for side in (reads, writes))
        stream = stream or current_stream()
        self.actions.append(Work(name, stream, read, written, kernels, blocks_host))

    def _block(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor's memory, which is new if it was never seen."""
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
        """Note what nothing refers to any more, and what ``resize_`` has given another size."""
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

    def operator(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operator and note what it does."""
        self._free()
        special = _SPECIAL.get(str(op))
        if special is not None:
            return special(self, op, *args, **kwargs)
        if str(op).startswith("streams."):  # of the user's, in a graph
            return run_on_streams(op, args, kwargs)
        if str(op).startswith("graphshard."):
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
        op: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
    ) -> None:
        """Note an operator that is no view, of the host, of the device, or a copy between both."""
        is_copy = base_name(op) in ("copy_", "_to_copy")  # others take numbers from the host
        on_host = [
            t for t in (*inputs, *outputs) if t.device.type == "cpu" and (t.dim() or is_copy)
        ]
        on_device = [t for t in (*inputs, *outputs) if t.device.type != "cpu"]
        if not on_device:
            self.work(str(op), inputs, outputs, HOST)
        elif on_host and isinstance(op, OpOverload):  # others only keep states of generators there
            is_async = _is_non_blocking(op, args, kwargs)
            if is_async and base_name(op) == "_to_copy":
                self._pin_copies(outputs)
            is_async = is_async and all(map(self._is_pinned, on_host))
            self.work(str(op), inputs, outputs, blocks_host=not is_async)
            if not is_async:
                self._order(current_stream(), HOST)
        else:
            self.work(str(op), inputs, outputs, kernels=num_kernels(op, args, kwargs))

    def _pin_copies(self, outputs: Iterable[torch.Tensor]) -> None:
        """Note that the host's memory of a copy for which it is not to wait is made locked
        (``_to_copy`` in aten/src/ATen/native/TensorConversions.cpp)."""
        for tensor in outputs:
            if tensor.device.type == "cpu":
                self.pinned(tensor)

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        pinned = self._pinned.get(WeakStorage(tensor).address)
        return pinned is not None and not pinned.is_gone()

    def _launch(self, name: str, args: Sequence[Any], outputs: Any) -> None:
        """Note a collective: on the stream of its group, from where the current stream is."""
        inputs, results = list(tensors_in(args)), list(tensors_in([outputs]))
        for tensor in (*inputs, *results):
            self._block(tensor)
        group = str(args[-1])
        number = self._run.launch(Launch(name, group))
        stream = f"nccl {group}"
        self._order(current_stream(), stream)
        self.work(name, inputs, results, stream)
        launched = Launched(self._run, number, self._record(stream), [*inputs, *results])
        for result in results:
            self._launched.setdefault(self._block(result), []).append(launched)

    def _wait(self, op: Any, tensor: torch.Tensor) -> torch.Tensor:
        """The current stream waits; then nothing keeps the tensors of the collective."""
        for launched in self._launched.pop(self._block(tensor), ()):
            launched.run.wait(launched.number)
            if action := launched.wait(current_stream()):
                self.actions.append(action)
        return tensor

    def _own(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run one of this project's operators as on a device: what it calls is noted."""
        if op in (host_copy.copy_to_device, host_copy.copy_to_host):
            self._run.launch(Launch(str(op), ""))
        with _Operators(self):
            return implementation_of(op)(*args, **kwargs)

    def register(self, tensor: torch.Tensor, work: dist.Work) -> None:
        """Have the next wait for ``tensor`` wait for ``work``, which was launched last."""
        launched = Registered(self._run, len(self._run.launches) - 1, work)
        self._launched.setdefault(self._block(tensor), []).append(launched)

    def _record_stream(self, op: Any, tensor: torch.Tensor, stream: torch.Stream) -> None:
        self.actions.append(RecordStream(self._block(tensor), stream_name(stream.stream_id)))

    def _synchronize(self, op: Any, *device: Any) -> None:
        self.synchronized()

    def _record(self, stream: str) -> int:
        """Record an event; those of this class have numbers below 0."""
        self._num_events -= 1
        self.actions.append(Record(self._num_events, stream))
        return self._num_events

    def _order(self, first: str, second: str) -> None:
        self.actions.append(WaitEvent(self._record(first), second))


_SPECIAL: dict[str, Callable[..., Any]] = {
    "_c10d_functional.wait_tensor.default": Recorder._wait,
    "aten.record_stream.default": Recorder._record_stream,
    "streams.synchronize_device.default": Recorder._synchronize,
}


class _Operators(DispatchMode):
    """Hands every operator to a recorder."""

    supports_higher_order_operators = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_traceable_wrapper_subclass, tensors_in([args, kwargs]))):
            return NotImplemented  # a DTensor runs the operator again, on its shard
        return self._recorder.operator(func, args, kwargs or {})


def stream_name(number: int) -> str:
    """Return the name of a stream of ``no_gpu.cpp``."""
    return f"stream {number}" if number else COMPUTE


def current_stream() -> str:
    """Return the name of the stream that is current on this thread."""
    return stream_name(torch.accelerator.current_stream("cuda:0").stream_id)


def _is_non_blocking(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return the value of an operator's argument ``non_blocking``; False if it has none."""
    names = argument_names(op)
    if "non_blocking" not in names:
        return False
    position = names.index("non_blocking")
    return bool(args[position] if position < len(args) else kwargs.get("non_blocking"))


@functools.cache
def _parameters(source: str) -> tuple[str, ...]:
    """Return the names of a Triton kernel's parameters."""
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
    (kernel,) = [f for f in functions if f.name.startswith("triton_")]
    return tuple(argument.arg for argument in kernel.args.args)
