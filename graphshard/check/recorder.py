"""Writes down what generated code does while it runs over fake tensors: a list of actions.

    generated code ──► operators, kernels, allocations ──► Recorder ──► Allocate, Work, Record, ..
                       streams, events (``no_gpu.cpp``) ──►

A kernel reads its ``in_ptr`` and writes its ``out_ptr`` arguments; an operator tells by its schema.
A block is a tensor's storage; it is freed when nothing refers to it any more, which is looked up
before every action. Collectives run as in ``torch/csrc/distributed/c10d``: a stream of the group
waits for the current one, and inputs and outputs are kept until somebody waits.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from .._torch.no_gpu.operators import DispatchMode, WeakStorage, is_view, tensors_in, written_in
from .._torch.no_gpu.stand_ins import Hooks
from ..ops import host_copy
from .actions import HOST, Action, Allocate, Free, Record, RecordStream, WaitEvent, Work

COMPUTE = "compute"
"""The stream that is current when training begins."""


@dataclass(frozen=True)
class Launch:
    """A collective, or host copies that go together.

    Attributes:
        op: name of the operator.
        group: name of the process group; "" of a host copy.
    """

    op: str
    group: str


@dataclass
class GraphRun:
    """One call of a graph.

    Attributes:
        launches: in order.
        order: a number in ``launches`` where one is launched; its complement (``~``) where the
            current stream first waits for it.
    """

    launches: list[Launch] = field(default_factory=list)
    order: list[int] = field(default_factory=list)

    def launch(self, launch: Launch) -> int:
        """Append a launch and return its number."""
        self.launches.append(launch)
        self.order.append(len(self.launches) - 1)
        return self.order[-1]

    def wait(self, number: int) -> None:
        """Append a wait, unless there is one."""
        if ~number not in self.order:
            self.order.append(~number)


class Recorder(Hooks):
    """Actions and texts of a process. Graphs are recorded while they run; kernels when made.

    Attributes:
        actions: in the order in which the host asked for them.
        kernels: name and source of each.
        codes: of each graph.
        runs: of graphs, since ``begin_step``.
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
        self._blocks: dict[int, tuple[int, WeakStorage]] = {}
        self._num_blocks = self._num_events = 0
        self._launched: dict[int, list[_Launched | _Registered]] = {}

    def begin_step(self) -> None:
        """Forget the runs of the step before."""
        self.runs = []

    # --- what the generated code tells ---------------------------------------------------------

    def kernel_made(self, name: str, source: str) -> None:
        self.kernels.append((name, source))

    def graph_made(self, source: str) -> None:
        self.codes.append(source)

    def graph_runs(self, call: Callable[..., Any], arguments: Any) -> Any:
        self._is_recording = True
        self.runs.append(GraphRun())
        try:
            with _Operators(self):
                return call(arguments)
        finally:
            self._is_recording = False

    def kernel_runs(self, name: str, source: str, arguments: tuple[Any, ...]) -> None:
        names = _parameters(source)
        pairs = [(n, a) for n, a in zip(names, arguments) if isinstance(a, torch.Tensor)]
        reads = [a for n, a in pairs if not n.startswith("out_ptr")]
        writes = [a for n, a in pairs if "out_ptr" in n]
        self.work(name, reads, writes)

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
            case _:
                self.actions.append(Work(what, HOST))

    # --- actions -------------------------------------------------------------------------------

    def work(
        self,
        name: str,
        reads: Iterable[torch.Tensor],
        writes: Iterable[torch.Tensor],
        stream: str | None = None,
    ) -> None:
        """Note that ``name`` runs on a stream, the current one by default."""
        self._free()
        numbers = [tuple(dict.fromkeys(map(self._block, side))) for side in (reads, writes)]
        self.actions.append(Work(name, stream or current_stream(), *numbers))

    def _block(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor's memory, which is new if it was never seen."""
        storage = WeakStorage(tensor)
        known = self._blocks.get(storage.address)
        if known is None:
            known = self._blocks[storage.address] = (self._num_blocks, storage)
            self._num_blocks += 1
            home = HOST if tensor.device.type == "cpu" else current_stream()
            self.actions.append(Allocate(known[0], storage.num_bytes, home))
        return known[0]

    def _free(self) -> None:
        """Note what nothing refers to any more."""
        gone = [address for address, (_, storage) in self._blocks.items() if storage.is_gone()]
        for address in gone:
            self.actions.append(Free(self._blocks.pop(address)[0]))

    # --- operators -----------------------------------------------------------------------------

    def operator(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operator and note what it does."""
        special = _SPECIAL.get(str(op))
        if special is not None:
            return special(self, op, *args, **kwargs)
        outputs = op(*args, **kwargs)
        if str(op).startswith("_c10d_functional."):
            self._launch(str(op), args, outputs)
            return outputs
        inputs = list(tensors_in([args, kwargs]))
        written = list(written_in(op, args, kwargs))
        made = [] if is_view(op) else list(tensors_in([outputs]))
        if made or written:
            on_host = all(t.device.type == "cpu" for t in (*inputs, *made))
            self.work(str(op), inputs, [*written, *made], HOST if on_host else None)
        return outputs

    def _launch(self, name: str, args: Sequence[Any], outputs: Any) -> None:
        """Note a collective: on the stream of its group, from where the current stream is."""
        inputs, results = list(tensors_in(args)), list(tensors_in([outputs]))
        for tensor in (*inputs, *results):
            self._block(tensor)
        group = str(args[-1])
        number = self.runs[-1].launch(Launch(name, group))
        stream = f"nccl {group}"
        self._order(current_stream(), stream)
        self.work(name, inputs, results, stream)
        launched = _Launched(number, self._record(stream), [*inputs, *results])
        for result in results:
            self._launched.setdefault(self._block(result), []).append(launched)

    def _wait(self, op: Any, tensor: torch.Tensor) -> torch.Tensor:
        """The current stream waits; then nothing keeps the tensors of the collective."""
        self._free()
        for launched in self._launched.pop(self._block(tensor), ()):
            self.runs[-1].wait(launched.number)
            launched.wait(self)
        return tensor

    def _copy(self, op: Any, tensors: list[torch.Tensor], *args: Any) -> list[torch.Tensor]:
        """Copies to and from the host as this project launches them on a device."""
        self.runs[-1].launch(Launch(str(op), ""))
        name = str(op).split(".")[1]
        with _Operators(self):
            copies: list[torch.Tensor] = getattr(host_copy, f"_{name}")(tensors, *args)
        return copies

    def register(self, tensor: torch.Tensor, work: dist.Work) -> None:
        """Have the next wait for ``tensor`` wait for ``work``, which was launched last."""
        launched = _Registered(len(self.runs[-1].launches) - 1, work)
        self._launched.setdefault(self._block(tensor), []).append(launched)

    def _record_stream(self, op: Any, tensor: torch.Tensor, stream: torch.Stream) -> None:
        self.actions.append(RecordStream(self._block(tensor), stream_name(stream.stream_id)))

    def _scaled_mm(self, op: Any, *args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """A product in fp8, whose variant with ``out`` does not take fake tensors."""
        self.work(str(op), tensors_in([args, kwargs]), [out])
        return out

    def _record(self, stream: str) -> int:
        """Record an event; those of this class have numbers below 0."""
        self._num_events -= 1
        self.actions.append(Record(self._num_events, stream))
        return self._num_events

    def _order(self, first: str, second: str) -> None:
        self.actions.append(WaitEvent(self._record(first), second))


_SPECIAL: dict[str, Callable[..., Any]] = {
    "_c10d_functional.wait_tensor.default": Recorder._wait,
    "graphshard.copy_to_device.default": Recorder._copy,
    "graphshard.copy_to_host.default": Recorder._copy,
    "aten.record_stream.default": Recorder._record_stream,
    "aten._scaled_mm.out": Recorder._scaled_mm,
}


class _Launched:
    """A collective in flight, and what it keeps."""

    def __init__(self, number: int, event: int, kept: list[torch.Tensor]) -> None:
        self.number, self._event, self._kept = number, event, kept

    def wait(self, recorder: Recorder) -> None:
        recorder.actions.append(WaitEvent(self._event, current_stream()))
        self._kept.clear()


class _Registered:
    """A ``Work`` of this project's own."""

    def __init__(self, number: int, work: dist.Work) -> None:
        self.number, self._work = number, work

    def wait(self, recorder: Recorder) -> None:
        self._work.wait()


class _Operators(DispatchMode):
    """Hands every operator to a recorder."""

    supports_higher_order_operators = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.operator(func, args, kwargs or {})


def stream_name(number: int) -> str:
    """Return the name of a stream of ``no_gpu.cpp``."""
    return f"stream {number}" if number else COMPUTE


def current_stream() -> str:
    """Return the name of the stream that is current on this thread."""
    return stream_name(torch.accelerator.current_stream("cuda:0").stream_id)


@functools.cache
def _parameters(source: str) -> tuple[str, ...]:
    """Return the names of a Triton kernel's parameters."""
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
    (kernel,) = [f for f in functions if f.name.startswith("triton_")]
    return tuple(argument.arg for argument in kernel.args.args)
