"""One case on the ranks: a sharded model beside plain copies, one on each rank, whose gradients are
averaged as DDP does. `run_trial` is what every rank calls."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import graphshard
from tests.numerics.compare import whole
from tests.numerics.fuzz.case import Case
from tests.numerics.fuzz.model import Model, batch, loss
from tests.numerics.fuzz.modules import BREAKS

TOLERANCE = {"float64": 1e-7, "float32": 1e-4}
"""Relative errors, by precision; others: `ROUGH`."""
ROUGH = 0.06
FLOOR = 1e-2
"""A tensor smaller than this part of the largest gradient is compared as if it was so large."""
POLICIES = {
    "bf16": MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32),
    "bf16_reduced_in_float32": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "fp8": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
}
WIDE_SUMS = {
    "float64": MixedPrecisionPolicy(reduce_dtype=torch.float64),
    "float32": MixedPrecisionPolicy(reduce_dtype=torch.float64),
    "autocast": MixedPrecisionPolicy(reduce_dtype=torch.float64),
}


def run_trial(case: Case) -> int:
    """Train both models; return the number of graphs.

    Raises:
        AssertionError: on all ranks, if on any of them the two differ.
    """
    # Flags, sizes, accumulation and evaluation make more graphs than Dynamo allows by default.
    torch._dynamo.config.recompile_limit = 64
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "graphshard: Model does not compile to one graph")
        return _Trial(case).train()


class Plain:
    """The unsharded copy of one rank. In mixed precision its values and its gradients are kept
    beside a model that computes."""

    def __init__(self, case: Case) -> None:
        self.values = _prepared(case, case.seed)
        self.computes = copy.deepcopy(self.values)
        policy = POLICIES.get(case.precision, MixedPrecisionPolicy())
        self.dtype, self.output_dtype = policy.param_dtype, policy.output_dtype
        self.ignored = set(map(id, _ignored(case, self.values)))
        for param in self.computes.parameters():
            if self.dtype and param.dtype == torch.float32:
                param.data = param.data.to(self.dtype)
        if case.precision == "fp8":
            self.computes = _by_torchao(self.computes)

    def __call__(self, x: Tensor, flag: bool) -> Any:
        """Return the outputs."""
        if self.dtype and x.is_floating_point():
            x = x.to(self.dtype)
        return _cast(self.computes(x, flag), self.output_dtype)

    def _pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        return zip(self.values.parameters(), self.computes.parameters(), strict=True)

    def begin_step(self) -> None:
        """Compute with the values of now."""
        with torch.no_grad():
            for value, param in self._pairs():
                param.copy_(value)
                param.requires_grad_(value.requires_grad)

    def collect(self) -> None:
        """Add the gradients of a backward to those of the step."""
        for value, param in self._pairs():
            if param.grad is not None:
                grad = param.grad.to(value.dtype)
                value.grad = grad.clone() if value.grad is None else value.grad + grad
                param.grad = None

    def reduce(self, before: dict[str, Tensor]) -> None:
        """Average over all ranks what this step has added to gradients.

        Args:
            before: gradients, averaged already.
        """
        for name, value in self.values.named_parameters():
            if value.grad is None or id(value) in self.ignored:
                continue
            old = before.get(name, torch.zeros_like(value))
            new = torch.view_as_real(value.grad - old) if value.is_complex() else value.grad - old
            dist.all_reduce(new)
            new = torch.view_as_complex(new) if value.is_complex() else new
            value.grad = old + new / dist.get_world_size()


class _Trial:
    """A case's two models and what they have to agree on."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.rank = dist.get_rank()
        self.faults: list[str] = []
        self.plain = Plain(case)
        self.model = _prepared(case, case.seed + (self.rank if case.sync else 0))
        self.optimizer = _optimizer(case, self.model) if case.early else None
        self.options = _options(case, self.model)
        torch._dynamo.utils.counters.clear()
        self.compiled = self._compile()

    def _compile(self) -> Callable[..., Any]:
        case, model, mesh = self.case, self.model, _mesh(self.case)
        if case.entrance == "shard":
            graphshard.shard(model, mesh, **self.options)
        backend = graphshard.backend(mesh, **self.options)
        keywords = {
            "backend": backend,
            "fullgraph": not case.kinds() & BREAKS,
            "dynamic": case.dynamic,
        }
        if case.entrance == "in_place":
            model.compile(**keywords)
            return model
        if case.entrance == "function":
            return torch.compile(lambda x, flag: model(x, flag), **keywords)
        return torch.compile(model, **keywords)

    def train(self) -> int:
        """All steps."""
        theirs = _optimizer(self.case, self.plain.values)
        for step in range(self.case.steps):
            if self.case.thaw and step == 1:
                _thaw(self.model)
                _thaw(self.plain.values)
            self._backward(step)
            self._compare(f"step {step}", grads=True)
            self.optimizer = self.optimizer or _optimizer(self.case, self.model)
            for optimizer in (self.optimizer, theirs):
                optimizer.step()
                optimizer.zero_grad(set_to_none=not self.case.zeroes)
            self._compare(f"after step {step}", grads=False)
            if self.case.evaluation:
                self._evaluate(step)
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    def _backward(self, step: int) -> None:
        """Forwards and backwards of a step's microbatches."""
        self.plain.begin_step()
        before = {n: p.grad for n, p in self.plain.values.named_parameters() if p.grad is not None}
        for micro in range(self.case.micros):
            last = micro == self.case.micros - 1 or self.case.reduces_micros
            flag = (self.case.seed + step + micro) % 2 == 0
            x = batch(self.case, step, micro, self.rank)
            with contextlib.nullcontext() if last else graphshard.no_sync(self.model):
                ours = self._loss(self.compiled, x, flag)
                ours.backward()
            theirs = self._loss(self.plain, x, flag)
            theirs.backward()
            self.plain.collect()
            self._note(f"loss of step {step}, microbatch {micro}", ours, theirs)
        self.plain.reduce(before)

    def _loss(self, model: Callable[..., Any], x: Tensor, flag: bool) -> Tensor:
        with _autocast(self.case):
            total = loss(model(x, flag))
            if self.case.forwards == 2:
                total = total + loss(model(x.flip(0), flag))
        return total

    def _evaluate(self, step: int) -> None:
        x = batch(self.case, step, 100, self.rank)
        mode = torch.no_grad if self.case.evaluation == "no_grad" else torch.inference_mode
        self.plain.begin_step()
        results = []
        for module, run in ((self.model, self.compiled), (self.plain.computes, self.plain)):
            module.eval()
            with mode():
                results.append(self._loss(run, x, True))
            module.train()
        self._note(f"evaluation after step {step}", *results)
        self._raise_together()

    def _compare(self, when: str, *, grads: bool) -> None:
        """Parameters and buffers, or gradients."""
        theirs = dict(self.plain.values.named_parameters())
        largest = max(
            (float(p.grad.norm()) for p in theirs.values() if p.grad is not None), default=0.0
        )
        ours = dict(self.model.named_parameters())
        assert list(ours) == list(theirs)
        for name, param in theirs.items():
            if ours[name].requires_grad != param.requires_grad:
                self.faults.append(f"{name}.requires_grad is {ours[name].requires_grad}")
            if grads:
                self._note(f"{name}.grad, {when}", ours[name].grad, param.grad, largest)
            else:
                self._note(f"{name}, {when}", ours[name], param, 1.0)
        for name, buffer in self.model.named_buffers():
            self._note(f"{name}, {when}", buffer, self.plain.computes.get_buffer(name), 1.0)
        self._raise_together()

    def _note(
        self, what: str, ours: Tensor | None, theirs: Tensor | None, scale: float = 0.0
    ) -> None:
        """Remember that two tensors differ by more than is allowed."""
        if ours is None or theirs is None:
            if (ours is None) != (theirs is None):
                sizes = [None if t is None else float(whole(t).norm()) for t in (ours, theirs)]
                self.faults.append(f"{what}: norm {sizes[0]} instead of {sizes[1]}")
            return
        full = whole(ours)
        facts, expected = (full.dtype, full.shape), (theirs.dtype, theirs.shape)
        if facts != expected:
            self.faults.append(f"{what}: {facts} instead of {expected}")
            return
        kind = torch.complex128 if theirs.is_complex() else torch.float64
        difference = float((full.to(kind) - theirs.detach().to(kind)).norm())
        size = max(float(theirs.detach().to(kind).norm()), FLOOR * scale, 1e-12)
        if not difference <= TOLERANCE.get(self.case.precision, ROUGH) * size:
            self.faults.append(f"{what}: relative error {difference / size:.1e}")

    def _raise_together(self) -> None:
        """
        Raises:
            AssertionError: on every rank, if one has a fault.
        """
        found: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(found, self.faults)
        if any(found):
            texts = [f"rank {rank}: {text}" for rank, f in enumerate(found) for text in f[:4]]
            raise AssertionError("; ".join(texts))


def _prepared(case: Case, seed: int) -> Model:
    torch.manual_seed(seed)
    model = Model(case)
    floats = (p for p in model.blocks.parameters() if p.is_floating_point())
    for param, frozen in zip(floats, cycle(case.frozen or (False,))):
        param.requires_grad_(not frozen)
    return model


def _thaw(model: nn.Module) -> None:
    """Train what was frozen, and freeze the first parameter of the blocks."""
    floats = [p for n, p in model.named_parameters() if n.startswith("blocks.")]
    for i, param in enumerate(p for p in floats if p.is_floating_point()):
        param.requires_grad_(i != 0)


def _optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    if case.optimizer == "adamw":  # eps: gradients that are rounding errors change nothing
        return torch.optim.AdamW(params, lr=0.01, eps=1e-2, foreach=False if case.ignored else None)
    momentum = 0.9 if case.optimizer == "momentum" else 0.0
    return torch.optim.SGD(
        params, lr=0.05, momentum=momentum, foreach=False if case.ignored else None
    )


def _mesh(case: Case) -> Any:
    return init_device_mesh(
        "cpu", case.mesh, mesh_dim_names=("replicate", "shard")[-len(case.mesh) :]
    )


def _ignored(case: Case, model: nn.Module) -> list[nn.Parameter]:
    params = [p for p in model.parameters() if p.is_floating_point()]
    return [params[i] for i in case.ignored if i < len(params) - 1]


def _options(case: Case, model: nn.Module) -> dict[str, Any]:
    """Return the arguments of ``graphshard.backend``."""
    options: dict[str, Any] = {
        "reshard_after_forward": case.reshard,
        "compiler": case.compiler,
        "schedule": graphshard.SchedulePolicy(**dict(case.schedule)),
        "sync_module_states": case.sync,
        "ignored_params": _ignored(case, model),
        "overrides": _overrides(case, model),
    }
    if case.precision in POLICIES:
        options["mp_policy"] = POLICIES[case.precision]
    if case.precision == "fp8":
        options["fp8"] = graphshard.Float8Policy(filter_fn=_fits_fp8)
    if case.offload == "shards":
        options["offload_policy"] = CPUOffloadPolicy()
    return options


def _overrides(case: Case, model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return those that match a parameter, in words of ``graphshard.backend``."""
    ignored = set(map(id, _ignored(case, model)))
    names = [
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        for name, param in module.named_parameters(recurse=False)
        if id(param) not in ignored
    ]
    found: dict[str, dict[str, Any]] = {}
    for glob, option, value in case.overrides:
        if any(fnmatchcase(name, glob) for name in names):
            if option == "offload_policy":
                value = CPUOffloadPolicy()
            if option == "mp_policy":
                value = WIDE_SUMS.get(case.precision, POLICIES["bf16_reduced_in_float32"])
            found.setdefault(glob, {})[option] = value
    return found


def _autocast(case: Case) -> AbstractContextManager[Any]:
    if case.precision == "autocast":
        return torch.autocast("cpu", torch.bfloat16)
    return contextlib.nullcontext()


def _cast(output: Any, dtype: torch.dtype | None) -> Any:
    """Return an output of a model with its floating-point tensors in another dtype."""
    if isinstance(output, Tensor):
        return output.to(dtype) if dtype and output.is_floating_point() else output
    if isinstance(output, dict):
        return {key: _cast(value, dtype) for key, value in output.items()}
    if isinstance(output, (tuple, list)):
        return type(output)(_cast(value, dtype) for value in output)
    return output


def _fits_fp8(fqn: str, shape: tuple[int, ...]) -> bool:
    return fqn.startswith("blocks.") and all(size % 16 == 0 for size in shape)


def _by_torchao(model: nn.Module) -> nn.Module:
    from torchao.float8 import convert_to_float8_training

    def chosen(module: nn.Module, fqn: str) -> bool:
        return type(module) is nn.Linear and _fits_fp8(f"{fqn}.weight", tuple(module.weight.shape))

    return convert_to_float8_training(model, module_filter_fn=chosen)
