"""Every private torch API that graphshard uses, in one place, read on torch 2.11.0 and 2.13.0.

Nothing else in the package imports a name that torch spells with an underscore. When torch moves,
this is the file to mend; each section says which torch file it leans on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import ShortenTraceback, TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import ChainedSource, Guard, Source
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import (
    CustomGraphPass,
    CustomPartitionerFn,
    get_hash_for_files,
)
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "CustomGraphPass",
    "CustomPartitionerFn",
    "aot_autograd",
    "cache_dir",
    "compile_fx",
    "get_hash_for_files",
    "is_traceable_wrapper_subclass",
    "min_cut_rematerialization_partition",
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


# --- torch/_dynamo/resume_execution.py, symbolic_convert.py: the frame that is being traced ---------------------------


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

    def guard(self, source: Source, holds: Callable[[Any], bool], text: str) -> None:
        """Guard the frame on ``holds(value of source)``, evaluated at every call."""

        def create(builder: Any, guard: Guard) -> None:
            builder.get_guard_manager(guard).add_lambda_guard(holds, [text], guard.user_stack)

        self._tx.output.guards.add(source.make_guard(create))


def sources(gm: fx.GraphModule) -> list[Source]:
    """The Dynamo source of every placeholder, in order."""
    return [n._dynamo_source for n in gm.graph.nodes if n.op == "placeholder"]  # type: ignore[attr-defined]


def source_name(source: Source) -> str:
    return source.name if isinstance(source.name, str) else source.name()


def is_dynamo_entry(frame: Any) -> bool:
    """Whether ``frame`` is where ``torch.compile`` hands over to Dynamo (eval_frame.py)."""
    return (
        frame.f_code.co_name == "compile_wrapper" and frame.f_globals["__name__"] == _EVAL_FRAME
    )


_EVAL_FRAME = "torch._dynamo.eval_frame"


def frames(depth: int = 1) -> Iterator[Any]:
    """The Python stack, innermost first."""
    frame = sys._getframe(depth + 1)
    while frame is not None:
        yield frame
        frame = frame.f_back  # type: ignore[assignment]


# --- torch/nn/modules/module.py ------------------------------------------------------------------


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The registered parameters of this module alone; writable."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return module._buffers


# --- torch/distributed/tensor/_api.py ------------------------------------------------------------


def local_tensor(dtensor: DTensor) -> torch.Tensor:
    """The local tensor itself (``to_local()`` makes a view that differs at each call)."""
    return dtensor._local_tensor


def set_local_tensor(dtensor: DTensor, local: torch.Tensor) -> None:
    """As FSDP2's ``reset_sharded_param`` does (fsdp/_fully_shard/_fsdp_param.py)."""
    dtensor._local_tensor = local


def dtensor_like(local: torch.Tensor, like: DTensor) -> DTensor:
    """``DTensor.from_local`` without its cost, for a gradient laid out as ``like``."""
    return DTensor(local, like._spec, requires_grad=False)  # type: ignore[call-arg]


# --- torch/_tensor.py: hooks ---------------------------------------------------------------------


def share_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    """``new`` takes over the hook tables of ``old``, so handles given out earlier still remove."""
    if old._backward_hooks:
        new._backward_hooks = old._backward_hooks
    if old._post_accumulate_grad_hooks:  # type: ignore[attr-defined]
        new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks  # type: ignore[attr-defined]


def gradient_hooks(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], torch.Tensor | None]]:
    return list((tensor._backward_hooks or {}).values())


def post_accumulate_hooks(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], None]]:
    return list((tensor._post_accumulate_grad_hooks or {}).values())  # type: ignore[attr-defined]


# --- torch/distributed/distributed_c10d.py, _functional_collectives.py ----------------------------


def group_size(group_name: str) -> int:
    return dist.get_world_size(dist.distributed_c10d._resolve_process_group(group_name))


# --- torch/_inductor/config.py -------------------------------------------------------------------

# The written order of collectives survives Inductor only with both reorderings off.
KEEP_ORDER: Mapping[str, Any] = {
    "reorder_for_peak_memory": False,
    "reorder_for_locality": False,
}


def source_hash(files: Sequence[Path], extra: str) -> bytes:
    return get_hash_for_files(tuple(str(f) for f in files), extra)
