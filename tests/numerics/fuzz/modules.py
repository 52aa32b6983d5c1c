"""Blocks of a fuzzed model.

These are leaves, and wrappers that call other blocks, for example twice, in a checkpoint, outside
of the graph, or conditionally. All map `[rows, length, dim]` to the same shape.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from tests.numerics.fuzz.habits import READERS

Flag = bool
"""Argument of every wrapper: whether to run conditional blocks."""


class OverLength(nn.Module):
    """Adapter for a module that takes `[rows, dim, length]`."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)[:, : x.shape[1]]


class OverRows(nn.Module):
    """Adapter for a module that takes `[rows * length, dim]`.

    A BatchNorm in `OverLength` fails in torch's own aot_eager: strides differ from the trace.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.flatten(0, 1)).view_as(x)


class Attention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.squeeze(1))


class SelfAttention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Convolved(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.back = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.norm(self.conv(x.unsqueeze(1)))).squeeze(1)


class Cell(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        state = self.cell(x[:, 1], self.cell(x[:, 0]))
        return x + state.unsqueeze(1)


class Pair(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.form = nn.Bilinear(dim, dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.form(x, x.roll(1, 1))


class Buffers(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("shift", torch.randn(dim))
        self.register_buffer("average", torch.zeros(dim))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)
        self.gain = nn.Parameter(torch.randn(dim))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.gain + self.shift + self.average
        if self.training:
            with torch.no_grad():
                self.average.mul_(0.5).add_(x.mean((0, 1)).to(self.average))
            self.calls = self.calls + 1
        return y.to(x.dtype)


class Tables(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.order = nn.Parameter(torch.randperm(dim), requires_grad=False)
        self.mask = nn.Parameter(torch.rand(dim) > 0.3, requires_grad=False)
        self.rows = nn.ParameterList(torch.randn(dim) for _ in range(3))
        self.named = nn.ParameterDict({"shift": torch.randn(1, dim)})

    def forward(self, x: Tensor) -> Tensor:
        total = sum((row for row in self.rows), self.named["shift"])
        return x[..., self.order] * self.mask + total


class Idle(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.never = nn.Linear(dim, 3)
        self.idle = nn.Parameter(torch.randn(3, dim))

    def forward(self, x: Tensor) -> Tensor:
        return x


class Experts(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, 3, bias=False)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        return (outputs * weights.unsqueeze(2)).sum(-1)


def _bottleneck(dim: int, width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(dim, width), nn.GELU(), nn.Linear(width, dim))


MODULES: dict[str, Callable[[int], nn.Module]] = {
    "no_bias": lambda dim: nn.Linear(dim, dim, bias=False),
    "one_wide": lambda dim: _bottleneck(dim, 1),
    "wide": lambda dim: _bottleneck(dim, 13),
    "tanh": lambda dim: nn.Tanh(),
    "layer_norm": nn.LayerNorm,
    "rms_norm": nn.RMSNorm,
    "batch_norm": lambda dim: OverRows(nn.BatchNorm1d(dim)),
    "fixed_norm": lambda dim: OverRows(nn.BatchNorm1d(dim, affine=False)),
    "conv": lambda dim: OverLength(nn.Conv1d(dim, dim, 3, padding=1)),
    "depthwise": lambda dim: OverLength(nn.Conv1d(dim, dim, 3, padding=1, groups=dim)),
    "transposed": lambda dim: OverLength(nn.ConvTranspose1d(dim, dim, 2)),
    "conv2d": Convolved,
    "attention": Attention,
    "multihead": SelfAttention,
    "cell": Cell,
    "pair": Pair,
    "prelu": lambda dim: nn.Sequential(nn.Linear(dim, dim), nn.PReLU()),
    "weight_norm": lambda dim: nn.utils.parametrizations.weight_norm(nn.Linear(dim, dim)),
    "orthogonal": lambda dim: nn.utils.parametrizations.orthogonal(
        nn.Linear(dim, dim), orthogonal_map="cayley"
    ),
    "buffers": Buffers,
    "tables": Tables,
    "idle": Idle,
    "experts": Experts,
    **READERS,
}
"""Leaves available in every case."""


class Split(nn.Sequential):
    def __init__(self, plan: dict[str, ParallelStyle], *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.plan = plan

    def parallelize(self, tp: DeviceMesh) -> None:
        """Parallelize the layers over the ranks of `tp`; the style of "" is for the whole block."""
        trained = {name: param.requires_grad for name, param in self.named_parameters()}
        parallelize_module(self, tp, {name: style for name, style in self.plan.items() if name})
        if "" in self.plan:
            parallelize_module(self, tp, self.plan[""])
        for name, param in self.named_parameters():
            param.requires_grad_(trained[name])  # SequenceParallel unfreezes parameters


class Heads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """Map `[rows, length, 12 * heads]` to `[rows, length, 4 * heads]`."""
        q, k, v = x.unflatten(-1, (-1, 3, 4)).transpose(1, 2).unbind(3)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


class WholeToRows(ParallelStyle):
    """Style that splits the input of a block by rows, and gathers its output."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        whole, rows = Replicate(), Shard(0)
        enter = PrepareModuleInput(
            input_layouts=(whole,), desired_input_layouts=(rows,), use_local_output=True
        )
        leave = PrepareModuleOutput(output_layouts=rows, desired_output_layouts=whole)
        return leave._apply(enter._apply(module, device_mesh), device_mesh)


SPLIT: dict[str, Callable[[int], nn.Module]] = {
    "split_mlp": lambda dim: Split(
        {"0": ColwiseParallel(), "2": RowwiseParallel()},
        nn.Linear(dim, 6),
        nn.GELU(),
        nn.Linear(6, dim),
    ),
    "split_heads": lambda dim: Split(
        {"0": ColwiseParallel(), "2": RowwiseParallel()},
        nn.Linear(dim, 24),
        Heads(),
        nn.Linear(8, dim, bias=False),
    ),
    "split_columns": lambda dim: Split(
        {"0": ColwiseParallel(output_layouts=Replicate())}, nn.Linear(dim, 10), nn.Linear(10, dim)
    ),
    "split_rows": lambda dim: Split(
        {"1": RowwiseParallel(input_layouts=Replicate())}, nn.Linear(dim, 2), nn.Linear(2, dim)
    ),
    "split_sequence": lambda dim: Split(
        {
            "0": SequenceParallel(sequence_dim=0),
            "1": ColwiseParallel(input_layouts=Shard(0)),
            "3": RowwiseParallel(output_layouts=Shard(0)),
            "": WholeToRows(),
        },
        nn.LayerNorm(dim),
        nn.Linear(dim, 6),
        nn.GELU(),
        nn.Linear(6, dim),
    ),
}
"""Tensor-parallel blocks, for two ranks."""


class Wrapper(nn.Module):
    def __init__(self, kind: str, parts: list[nn.Module]) -> None:
        super().__init__()
        self.kind = kind
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor, flag: Flag) -> Tensor:
        return WRAPPERS[self.kind](self, x, flag)

    def chain(self, x: Tensor, flag: Flag) -> Tensor:
        for part in self.parts:
            x = call(part, x, flag)
        return x


def call(part: nn.Module, x: Tensor, flag: Flag) -> Tensor:
    return part(x, flag) if isinstance(part, Wrapper) else part(x)


def _twice(self: Wrapper, x: Tensor, flag: Flag) -> Tensor:
    return self.chain(torch.tanh(self.chain(x, flag)), flag)


def _sum(self: Wrapper, x: Tensor, flag: Flag) -> Tensor:
    return sum((call(part, x, flag) for part in self.parts), torch.zeros_like(x))


def _sometimes(self: Wrapper, x: Tensor, flag: Flag) -> Tensor:
    return self.chain(x, flag) if flag else x


def _checkpoint(self: Wrapper, x: Tensor, flag: Flag) -> Tensor:
    return checkpoint(self.chain, x, flag, use_reentrant=False)


def _without_grad(self: Wrapper, x: Tensor, flag: Flag) -> Tensor:
    with torch.no_grad():
        y = self.chain(x, flag)
    return x + y


def _after_a_break(self: Wrapper, x: Tensor, flag: Flag) -> Tensor:
    torch._dynamo.graph_break()
    return self.chain(x, flag)


@torch.compiler.disable
def _outside(self: Wrapper, x: Tensor, flag: Flag) -> Tensor:
    return self.chain(x, flag)


WRAPPERS: dict[str, Callable[[Wrapper, Tensor, Flag], Tensor]] = {
    "chain": Wrapper.chain,
    "residual": lambda self, x, flag: x + self.chain(x, flag),
    "twice": _twice,
    "sum": _sum,
    "sometimes": _sometimes,
    "checkpoint": _checkpoint,
    "without_grad": _without_grad,
    "break": _after_a_break,
    "outside": _outside,
}
BREAKS = frozenset({"break", "outside"})
"""Wrappers that cause a graph break."""
WRITES = frozenset({"batch_norm", "fixed_norm", "buffers"})
"""Leaves that write buffers; in a checkpoint, they would write twice."""
