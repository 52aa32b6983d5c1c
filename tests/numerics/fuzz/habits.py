"""User code around training: reads of parameters, hooks, and changes of values between steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Reader(nn.Module):
    """Linears, two of them tied, and containers of parameters; `read` uses some of these."""

    def __init__(self, dim: int, read: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.first, self.second = (nn.Linear(dim, dim) for _ in range(3))
        self.second.weight = self.first.weight
        self.items = nn.ParameterList(torch.randn(dim) for _ in range(3))
        self.named = nn.ParameterDict({name: torch.randn(1, dim) for name in "ab"})
        self.read = read

    @property
    def tied(self) -> bool:
        return self.first.weight is self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self, self.linear(x))


def _slice(model: Reader, x: Tensor) -> Tensor:
    return x + sum(model.items[1:]) * model.items[0]


def _copy(model: Reader, x: Tensor) -> Tensor:
    return x + sum(model.named.copy().values())


def _identity(model: Reader, x: Tensor) -> Tensor:
    return model.first(x) * (2 if model.tied else 3) + model.second(x)


def _isinstance(model: Reader, x: Tensor) -> Tensor:
    params = [model.linear.weight, model.items[0], model.named["a"]]
    return x * (2 if all(isinstance(p, nn.Parameter) and p.is_leaf for p in params) else 3)


def _getattr(model: Reader, x: Tensor) -> Tensor:
    return x + sum(getattr(model, name).bias for name in ("linear", "first", "second"))


def _frozen(model: Reader, x: Tensor) -> Tensor:
    with torch.no_grad():
        weight = model.first.weight
        scale = 2 if weight.requires_grad else 3
    return F.linear(x, weight) * scale


def _closure(model: Reader, x: Tensor) -> Tensor:
    weight, bias = model.first.weight, model.second.bias
    return (lambda y: F.linear(y, weight, bias) + F.linear(y, model.second.weight))(x)


def _modules(model: Reader, x: Tensor) -> Tensor:
    return x + sum(m.bias for m in model.modules() if isinstance(m, nn.Linear))


def _penalty(model: Reader, x: Tensor) -> Tensor:
    return x + 0.1 * sum(p.square().mean() for p in model.parameters())


def _by_name(model: Reader, x: Tensor) -> Tensor:
    params = dict(model.named_parameters())
    return F.linear(x, params["first.weight"], model.get_parameter("second.bias"))


def _table(model: Reader, x: Tensor) -> Tensor:
    return x + model.linear._parameters["bias"] + model.items._parameters["1"]


def _vector(model: Reader, x: Tensor) -> Tensor:
    return x + nn.utils.parameters_to_vector(model.named.parameters()).sum()


TABLES: dict[str, Callable[[Reader, Tensor], Tensor]] = {
    "penalty": _penalty,
    "by_name": _by_name,
    "table": _table,
    "vector": _vector,
}
"""Reads that eager parts of a forward must not do, because they would get DTensors."""
READS: dict[str, Callable[[Reader, Tensor], Tensor]] = {
    "slice": _slice,
    "copy": _copy,
    "identity": _identity,
    "isinstance": _isinstance,
    "getattr": _getattr,
    "frozen": _frozen,
    "closure": _closure,
    "modules": _modules,
    **TABLES,
}
READERS: Mapping[str, Callable[[int], nn.Module]] = {
    f"read_{name}": lambda dim, read=read: Reader(dim, read) for name, read in READS.items()
}


def scaled(output: Any, factor: float) -> Any:
    if isinstance(output, Tensor):
        return output * factor if output.is_floating_point() else output
    if isinstance(output, dict):
        return {key: scaled(value, factor) for key, value in output.items()}
    if isinstance(output, (tuple, list)):
        return type(output)(scaled(value, factor) for value in output)
    return output


def _root_pre(model: Any) -> None:
    model.register_forward_pre_hook(lambda module, args: (args[0].flip(0), *args[1:]))


def _root_pre_kwargs(model: Any) -> None:
    model.register_forward_pre_hook(
        lambda module, args, kwargs: ((args[0].flip(1), *args[1:]), kwargs), with_kwargs=True
    )


def _root(model: Any) -> None:
    model.register_forward_hook(lambda module, args, output: scaled(output, 0.5))


def _root_always(model: Any) -> None:
    model.register_forward_hook(
        lambda module, args, kwargs, output: scaled(output, 2.0),
        with_kwargs=True,
        always_call=True,
    )


def _entry(model: Any) -> None:
    model.entry.register_forward_hook(lambda module, args, output: output.tanh())


def _head_pre(model: Any) -> None:
    model.head.register_forward_pre_hook(lambda module, args: args[0] * 0.5)


def _head_backward(model: Any) -> None:
    model.head.register_full_backward_hook(
        lambda module, into, out: tuple(g if g is None else g * 2 for g in into)
    )


HOOKS: dict[str, Callable[[Any], None]] = {
    "root_pre": _root_pre,
    "root_pre_kwargs": _root_pre_kwargs,
    "root": _root,
    "root_always": _root_always,
    "entry": _entry,
    "head_pre": _head_pre,
    "head_backward": _head_backward,
}
"""Functions that register a hook on a model."""


def _scale_data(param: nn.Parameter, plain: Tensor) -> None:
    param.data = param.data * 0.9


def _clamp_data(param: nn.Parameter, plain: Tensor) -> None:
    param.data.clamp_(-0.3, 0.3)


def _give_full(param: nn.Parameter, plain: Tensor) -> None:
    param.data = plain.to(param.dtype, copy=True) * 0.9


def _swap_data(param: nn.Parameter, plain: Tensor) -> None:
    before = param.data
    param.data = param.data * 0.5
    param.data = before * 0.9


def _copy_data(param: nn.Parameter, plain: Tensor) -> None:
    with torch.no_grad():
        param.copy_(param * 0.9)


WRITES_OF_DATA: dict[str, Callable[[nn.Parameter, Tensor], None]] = {
    "scale": _scale_data,
    "clamp": _clamp_data,
    "full": _give_full,
    "swap": _swap_data,
    "copy": _copy_data,
}
"""Functions that change a parameter between steps, given the plain copy's value."""


def write(kind: str, *models: nn.Module) -> None:
    """Apply the same change to the floating-point parameters of all models; the last is plain."""
    values = [p.detach().clone() for p in models[-1].parameters()]
    for model in models:
        for param, value in zip(model.parameters(), values, strict=True):
            if param.is_floating_point():
                WRITES_OF_DATA[kind](param, value)
