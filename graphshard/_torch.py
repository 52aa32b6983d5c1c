"""Every private torch API that graphshard uses, in one place, read on torch 2.11.0 and 2.13.0.

Nothing else in the package imports a name that torch spells with an underscore.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.eval_frame import innermost_backend, skip_code
from torch._dynamo.exc import ShortenTraceback, TensorifyScalarRestartAnalysis
from torch._dynamo.source import AttrSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import ChainedSource, CompileContext, Guard, Source, TracingContext
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import (
    CustomGraphPass,
    CustomPartitionerFn,
    get_hash_for_files,
)
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._logging import trace_structured
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.utils import _apply_to_tensors as apply_to_tensors
from torch.fx.experimental import symbolic_shapes
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from .sockets import shut_down

__all__ = [
    "CustomGraphPass",
    "CustomPartitionerFn",
    "aot_autograd",
    "apply_to_tensors",
    "cache_dir",
    "compile_fx",
    "get_hash_for_files",
    "innermost_backend",
    "is_traceable_wrapper_subclass",
    "make_boxed_func",
    "min_cut_rematerialization_partition",
    "unflatten_state_dict",
]

# --- torch/_dynamo/exc.py, output_graph.py: what a backend may raise -----------------------------


class Retrace(TensorifyScalarRestartAnalysis):
    """Makes Dynamo trace the frame again. It passes through ``OutputGraph.call_user_compiler``."""

    def __init__(self, reason: str) -> None:
        super().__init__(restart_reason=reason)


class BackendError(ShortenTraceback, ValueError):
    """An error of ours that reaches the user as it is, not wrapped in BackendCompilerFailed."""

    def __init__(self, message: str) -> None:
        super().__init__(message, first_useful_frame=None)


# --- torch/_dynamo/symbolic_convert.py: the frame that is being traced ----------------------------

RESUMED = "torch_dynamo_resume_in_"


class Trace:
    """The frame that Dynamo is tracing while it calls the backend."""

    def __init__(self) -> None:
        self._tx: Any = InstructionTranslator.current_tx()

    def retrace(self, reason: str) -> Retrace:
        """The exception to raise; what an earlier trace speculated does not hold any more."""
        self._tx.speculation_log.clear()
        return Retrace(reason)

    def value(self, source: Source) -> Any:
        return source.get_value({"G": self._tx.f_globals, "L": self._tx.f_locals}, {}, {})

    def owners(self, source: Source) -> Iterator[Any]:
        """What ``source`` is an attribute or item of, outermost object first."""
        chain = [source]
        while isinstance(chain[-1], ChainedSource):
            chain.append(chain[-1].base)
        for link in reversed(chain[1:]):
            try:
                yield self.value(link)
            except Exception:  # a source that Dynamo cannot evaluate outside its guards
                continue

    def owner(self) -> nn.Module | None:
        """The module whose method is being traced, if it is one."""
        owner = self._tx.f_locals.get("self")
        return owner if isinstance(owner, nn.Module) else None

    def is_resumed(self) -> bool:
        """Whether the frame goes on after a graph break."""
        return self._tx.f_code.co_name.startswith(RESUMED)

    def graph_break(self) -> str | None:
        """``file:line: reason`` if this graph ends in a break, else None."""
        reason = self._tx.output.compile_subgraph_reason
        if reason is None or not reason.graph_break:
            return None
        where = reason.user_stack[-1] if reason.user_stack else None
        first_line = reason.reason.strip().splitlines()[0] if reason.reason.strip() else "?"
        return f"{where.filename}:{where.lineno}: {first_line}" if where else first_line

    def guard(self, source: Source, attribute: str, holds: Callable[[Any], bool]) -> None:
        """Guard the frame on ``holds(source.attribute)``, evaluated at every call.

        On an attribute, because Dynamo may skip guards on a tensor itself while the dictionaries
        that lead to it have not changed (``find_tag_safe_roots`` in torch/_dynamo/guards.py).
        """
        text = f"graphshard: {source_name(source)} is in sync"

        def create(builder: Any, guard: Guard) -> None:
            builder.get_guard_manager(guard).add_lambda_guard(holds, [text], guard.user_stack)

        self._tx.output.guards.add(AttrSource(source, attribute).make_guard(create))


def on_compile_start(act: Callable[[Any], None]) -> None:
    """Have ``act`` called before Dynamo traces a frame, of whatever backend.

    ``torch._dynamo.reset()`` forgets it (torch/_dynamo/callback.py), so it is asked for repeatedly.
    """
    if act not in (handler := torch._dynamo.callback_handler).start_callbacks:
        handler.register_start_callback(act)


def run_as_python(function: Any) -> None:
    """Dynamo inlines ``function`` into traces, but never compiles a call of it from Python."""
    skip_code(function.__code__)


def graph_break_reasons() -> list[str]:
    """First lines of all reasons counted since the last reset (torch/_dynamo/utils.py)."""
    return [reason.splitlines()[0] for reason in counters["graph_break"]]


def sources(gm: fx.GraphModule) -> list[Source]:
    """The Dynamo source of every placeholder, in order."""
    return [n._dynamo_source for n in gm.graph.nodes if n.op == "placeholder"]


def source_name(source: Source) -> str:
    return source.name if isinstance(source.name, str) else source.name()


# --- torch/_guards.py, torch/_logging ------------------------------------------------------------


def compile_id() -> str:
    """Dynamo's name for the compilation that is under way, as in "0/0"; "" if there is none."""
    found = CompileContext.current_compile_id()
    return "" if found is None else str(found)


def trace_artifact(name: str, encoding: str, payload: Callable[[], str]) -> None:
    """Add to what ``TORCH_TRACE`` logs and tlparse shows; ``payload`` is called if it does log.

    Args:
        encoding: "json" or "string".
    """
    metadata = {"name": name, "encoding": encoding}
    trace_structured("artifact", metadata_fn=lambda: metadata, payload_fn=payload)


# --- torch/nn/modules/module.py ------------------------------------------------------------------


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The registered parameters of this module alone; writable."""
    return module._parameters


# --- torch/distributed/tensor/_api.py ------------------------------------------------------------


def local_tensor(dtensor: DTensor) -> torch.Tensor:
    """The local tensor itself (``to_local()`` makes a view that differs at each call)."""
    return dtensor._local_tensor


def set_local_tensor(dtensor: DTensor, local: torch.Tensor) -> None:
    """As FSDP2's ``reset_sharded_param`` does (fsdp/_fully_shard/_fsdp_param.py)."""
    dtensor._local_tensor = local


def dtensor_like(local: torch.Tensor, like: DTensor) -> DTensor:
    """``DTensor.from_local`` without its cost, for a gradient laid out as ``like``."""
    return DTensor(local, like._spec, requires_grad=False)


def dtensor_of(
    local: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size
) -> DTensor:
    """A contiguous one of that shape. ``DTensor.from_local`` would move what the host keeps to the
    device of the mesh."""
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), local.dtype)
    return DTensor(local, DTensorSpec(mesh, placements, tensor_meta=meta), requires_grad=False)


# --- torch/_tensor.py: hooks ---------------------------------------------------------------------


def share_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    """``new`` takes over the hook tables of ``old``, so handles given out earlier still remove."""
    if old._backward_hooks:
        new._backward_hooks = old._backward_hooks
    if old._post_accumulate_grad_hooks:
        new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks


def gradient_hooks(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], torch.Tensor | None]]:
    return list((tensor._backward_hooks or {}).values())


def post_accumulate_hooks(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], None]]:
    return list((tensor._post_accumulate_grad_hooks or {}).values())


# --- torch/autograd/variable.py ------------------------------------------------------------------


_called_after: dict[Callable[[], None], int] = {}  # the last backward, by what it ends with


def at_end_of_backward(act: Callable[[], None]) -> None:
    """Have ``act`` called once when the backward that is under way is over, if one is."""
    current = torch._C._current_graph_task_id()
    if current >= 0 and _called_after.get(act) != current:
        _called_after[act] = current
        torch.autograd.Variable._execution_engine.queue_callback(act)


# --- torch/_subclasses/fake_tensor.py -------------------------------------------------------------


def fake_mode_of(values: Iterable[Any]) -> Any:
    """The mode of the first fake tensor among ``values``, of which no more are looked at."""
    leaves = (leaf for value in values for leaf in tree_leaves(value))
    return next(leaf.fake_mode for leaf in leaves if isinstance(leaf, FakeTensor))


@contextmanager
def asking_fakes(value: torch.Tensor) -> Iterator[None]:
    """Calls run in the mode of the fake tensor ``value``, and what they refuse is not logged."""
    log = logging.getLogger(FakeTensor.__module__)
    log.addFilter(_nothing)
    try:
        with fake_mode_of([value]):
            yield
    finally:
        log.removeFilter(_nothing)


def _nothing(record: logging.LogRecord) -> bool:
    return False


# --- torch/_ops.py --------------------------------------------------------------------------------


def argument_names(op: Any) -> list[str]:
    """Of an operator's schema, in their order."""
    return [argument.name for argument in op._schema.arguments]


# --- torch/fx/experimental/symbolic_shapes.py ----------------------------------------------------


def size_hint(size: int | torch.SymInt, fallback: int = 4096) -> int:
    """What a size, or an expression of sizes, was when it was traced; no guard is added.

    Args:
        fallback: for a size that only data determines.
    """
    names = ("optimization_hint", "size_hint")  # 2.13, 2.11
    ask = next(getattr(symbolic_shapes, name) for name in names if hasattr(symbolic_shapes, name))
    return int(ask(size, fallback))


# --- torch/_inductor/config.py -------------------------------------------------------------------

# The written order of collectives survives Inductor only with both reorderings off.
KEEP_ORDER = {"reorder_for_peak_memory": False, "reorder_for_locality": False}


# A buffer that is being copied to the host is dead to Inductor, which would write over it. What is held
# until the wait for the copy is safe from the allocator alone.
KEEP_COPIED = {"allow_buffer_reuse": False}


def eager_backward() -> Any:
    """A context in which AOTAutograd compiles a backward graph together with its forward graph."""
    return functorch_config.patch(force_non_lazy_backward_lowering=True)


def saving_activations(budget: float | None) -> Any:
    """A context in which the partitioner saves no more than this part of the activations that it would;
    None: as the config says."""
    if budget is None:
        return nullcontext()
    # With 0 it would also recompute what has to be saved.
    return functorch_config.patch(activation_memory_budget=max(budget, 1e-9))


def donate_nothing() -> None:
    """Have the backward of the graph that is compiled not write over what was saved for it.

    AOTAutograd lets it, if the first backward does not retain its graph; that is not known yet.
    """
    metadata = TracingContext.get().fw_metadata
    if metadata is not None:
        metadata.bw_donated_idxs = []


# --- torch/distributed/distributed_c10d.py, gloo/rendezvous/context.cc ----------------------------


def process_group(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type,unused-ignore]


def is_registered(group: dist.ProcessGroup | None) -> bool:
    """False once the group was destroyed, or was never there."""
    return group in dist.distributed_c10d._world.pg_map


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """The group's store by a connection of its own: another thread may block the shared one."""
    store = dist.distributed_c10d._world.pg_map[group][1]
    return store.clone() if hasattr(store, "clone") else store


def group_timeout_s(group: dist.ProcessGroup) -> float:
    """How long a collective of ``group`` may take; torch's default where no backend tells."""
    backends = (group._get_backend(device) for device in group._device_types)
    timeouts = [getattr(getattr(of, "options", None), "_timeout", None) for of in backends]
    default = dist.distributed_c10d.default_pg_timeout
    return max(filter(None, timeouts), default=default).total_seconds()


def abort(group: dist.ProcessGroup, store: dist.Store) -> None:
    """Make collectives of ``group`` that are blocked on this rank raise, and all later ones.

    ``ProcessGroup.abort`` does it for NCCL and nothing for gloo. gloo raises where a peer closes its
    connection, so that is what happens here to the connections themselves.
    """
    shut_down(list(_gloo_addresses(group, store)))
    group.abort()


def _gloo_addresses(group: dist.ProcessGroup, store: dist.Store) -> Iterator[bytes]:
    """What gloo left in the store for every rank's network device; the ``sockaddr`` it listens at
    is in it, and each connection has a listener at one of its ends."""
    for device in group._device_types:
        for index in itertools.count():
            keys = [f"{device.type}//{index}/{rank}" for rank in range(group.size())]
            if not store.check(keys):
                break
            yield from map(store.get, keys)


def register_work(tensor: torch.Tensor, work: dist.Work) -> None:
    """Have ``wait_tensor`` of ``tensor`` wait for ``work``."""
    torch._C._distributed_c10d._register_work(tensor, work)


# --- torch/_foreach -------------------------------------------------------------------------------


def foreach_copy_(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy and cast each of ``sources``, on a GPU in as few kernels as can be."""
    torch._foreach_copy_(targets, sources)


def foreach_max_abs(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The largest absolute value of each, in one dimension."""
    return torch.stack(torch._foreach_norm(tensors, float("inf")))
