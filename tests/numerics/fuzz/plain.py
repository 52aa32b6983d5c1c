"""Each rank's plain copy of a case's model, and the loss."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.numerics.fuzz.case import Case
from tests.numerics.fuzz.habits import HOOKS
from tests.numerics.fuzz.model import Model, batch, flag, loss

POLICIES = {
    "bf16": MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32),
    "bf16_reduced_in_float32": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "fp8": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
}


def run_unsharded(case: Case) -> None:
    """Run the plain copy's graphs with a backend of torch: failures are not graphshard's."""
    plain = Plain(case)
    plain.computes = torch.compile(
        plain.computes, backend="aot_eager_decomp_partition", dynamic=case.dynamic
    )
    for step in range(case.steps):
        plain.begin_step()
        for micro in range(case.micros):
            x = batch(case, step, micro, dist.get_rank())
            plain.loss(x, flag(case, step, micro)).backward()
        plain.collect()
        if case.evaluation:
            with torch.no_grad():
                plain.loss(batch(case, step, 100, dist.get_rank()), True)


class Plain:
    """One rank's unsharded copy of a case's model.

    Attributes:
        values: model with parameters and gradients in their original dtypes.
        computes: model that runs forward and backward, with parameters in the compute dtype.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.values = prepared(case, case.seed)
        self.computes = copy.deepcopy(self.values)
        policy = POLICIES.get(case.precision, MixedPrecisionPolicy())
        self.dtype, self.output_dtype = policy.param_dtype, policy.output_dtype
        self.ignored = set(map(id, ignored_params(case, self.values)))
        for param in self.computes.parameters():
            if self.dtype and param.dtype == torch.float32:
                param.data = param.data.to(self.dtype)
        if case.precision == "fp8":
            self.computes = _by_torchao(self.computes)

    def __call__(self, x: Tensor, given: bool) -> Any:
        if self.dtype and x.is_floating_point():
            x = x.to(self.dtype)
        return _cast(self.computes(x, given), self.output_dtype)

    def loss(self, x: Tensor, given: bool) -> Tensor:
        return compute_loss(self.case, self, x, given)

    def _pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        return zip(self.values.parameters(), self.computes.parameters(), strict=True)

    def begin_step(self) -> dict[str, Tensor]:
        """Copy the current values into `computes`.

        Returns:
            Gradients accumulated so far, by parameter name.
        """
        with torch.no_grad():
            for value, param in self._pairs():
                param.copy_(value)
                param.requires_grad_(value.requires_grad)
        return {n: p.grad for n, p in self.values.named_parameters() if p.grad is not None}

    def collect(self) -> None:
        for value, param in self._pairs():
            if param.grad is not None:
                grad = param.grad.to(value.dtype)
                value.grad = grad.clone() if value.grad is None else value.grad + grad
                param.grad = None

    def reduce(self, before: dict[str, Tensor]) -> None:
        """Average the gradients of this step over all ranks, except those of ignored parameters.

        Args:
            before: gradients from before this step, already averaged.
        """
        for name, value in self.values.named_parameters():
            if value.grad is None or id(value) in self.ignored:
                continue
            old = before.get(name, torch.zeros_like(value))
            new = torch.view_as_real(value.grad - old) if value.is_complex() else value.grad - old
            dist.all_reduce(new)
            new = torch.view_as_complex(new) if value.is_complex() else new
            value.grad = old + new / dist.get_world_size()


def compute_loss(case: Case, model: Callable[..., Any], x: Tensor, given: bool) -> Tensor:
    with _autocast(case):
        total = loss(model(x, given))
        if case.forwards == 2:
            total = total + loss(model(x.flip(0), given))
    return total


def prepared(case: Case, seed: int) -> Model:
    """Build a case's model: draw values from `seed`, freeze parameters, register hooks."""
    torch.manual_seed(seed)
    model = Model(case)
    floats = (p for p in model.blocks.parameters() if p.is_floating_point())
    for param, frozen in zip(floats, cycle(case.frozen or (False,))):
        param.requires_grad_(not frozen)
    for hook in case.hooks:
        HOOKS[hook](model)
    return model


def ignored_params(case: Case, model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of `model` that the case ignores: never the last one."""
    params = [p for p in model.parameters() if p.is_floating_point()]
    return [params[i] for i in case.ignored if i < len(params) - 1]


def _autocast(case: Case) -> AbstractContextManager[Any]:
    if case.precision == "autocast":
        return torch.autocast("cpu", torch.bfloat16)
    return contextlib.nullcontext()


def _cast(output: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(output, Tensor):
        return output.to(dtype) if dtype and output.is_floating_point() else output
    if isinstance(output, dict):
        return {key: _cast(value, dtype) for key, value in output.items()}
    if isinstance(output, (tuple, list)):
        return type(output)(_cast(value, dtype) for value in output)
    return output


def fits_fp8(fqn: str, shape: tuple[int, ...]) -> bool:
    """Return whether the linears that use a parameter compute in fp8."""
    return fqn.startswith("blocks.") and all(size % 16 == 0 for size in shape)


def _by_torchao(model: nn.Module) -> nn.Module:
    from torchao.float8 import convert_to_float8_training

    def chosen(module: nn.Module, fqn: str) -> bool:
        return type(module) is nn.Linear and fits_fp8(f"{fqn}.weight", tuple(module.weight.shape))

    # torchao replaces only the first occurrence of a shared module: replace the others.
    names = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    model = convert_to_float8_training(model, module_filter_fn=chosen)
    converted = {id(module): model.get_submodule(name) for name, module in reversed(names.items())}
    for name, module in names.items():
        model.set_submodule(name, converted[id(module)])
    return model
