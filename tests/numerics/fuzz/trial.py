"""Train one case.

Compares a sharded model with one plain copy per rank, whose gradients are averaged as in DDP. Every
rank calls `run_trial`.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import graphshard
from tests.numerics.compare import whole
from tests.numerics.fuzz.case import EXACT, Case
from tests.numerics.fuzz.habits import write
from tests.numerics.fuzz.model import batch, flag
from tests.numerics.fuzz.modules import BREAKS, Split
from tests.numerics.fuzz.plain import (
    POLICIES,
    Plain,
    compute_loss,
    fits_fp8,
    ignored_params,
    prepared,
)

TOLERANCE = {"float64": 1e-7, "float32": 1e-4, "fp8": 0.15}
"""Allowed relative error by precision. In low precision, twice the plain copy's own rounding error
is allowed, too. Gradients in fp8 have two mantissa bits."""
ROUGH = 0.06  # for precisions without an entry in TOLERANCE
FLOOR = 1e-2
"""Lower bound of the norm in relative errors, as a fraction of the largest gradient's norm."""
LOSS = 10.0
"""Norm to which ``FLOOR`` applies for losses, whose terms may cancel."""
WIDE_SUMS = {
    "float64": MixedPrecisionPolicy(reduce_dtype=torch.float64),
    "float32": MixedPrecisionPolicy(reduce_dtype=torch.float64),
    "autocast": MixedPrecisionPolicy(reduce_dtype=torch.float64),
}


def _allow_recompiles() -> None:
    """Raise Dynamo's recompile limit: flags, sizes, accumulation and evaluation add graphs."""
    torch._dynamo.config.recompile_limit = 64


def run_trial(case: Case) -> int:
    """Train the sharded model and its plain copies; return the number of graphs.

    Raises:
        AssertionError: on all ranks, if the models differ on any of them.
    """
    _allow_recompiles()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "graphshard: Model does not compile to one graph")
        return _Trial(case).train()


class _Trial:
    def __init__(self, case: Case) -> None:
        self.case = case
        # Tensor-parallel ranks of one model get the same batches.
        self.rank = dist.get_rank() // case.splits
        self.mesh, tp = _meshes(case)
        self.faults: list[str] = []
        self.plain = Plain(case)
        # In low precision, a float32 copy determines the expected rounding.
        exact = replace(case, precision="float32")
        self.exact = None if case.precision in EXACT else Plain(exact)
        self.model = prepared(case, case.seed + (dist.get_rank() if case.sync else 0))
        for block in self.model.modules() if tp else ():
            if isinstance(block, Split):
                block.parallelize(tp)
        self.optimizer = _optimizer(case, self.model) if case.early else None
        self.options = _options(case, self.model)
        torch._dynamo.utils.counters.clear()
        self.compiled = self._compile()

    def _compile(self) -> Callable[..., Any]:
        case, model, mesh = self.case, self.model, self.mesh
        if case.entrance == "shard":
            graphshard.shard(model, mesh, **self.options)
        backend = graphshard.backend(mesh, **self.options)
        keywords = {
            "backend": backend,
            # Dynamo runs modules with backward hooks in Python.
            "fullgraph": not (case.kinds() & BREAKS or "head_backward" in case.hooks),
            "dynamic": case.dynamic,
        }
        if case.entrance == "in_place":
            model.compile(**keywords)
            return model
        if case.entrance == "function":
            return torch.compile(lambda x, flag: model(x, flag), **keywords)
        if case.entrance == "partial":
            return torch.compile(functools.partial(model), **keywords)
        if case.entrance == "method":
            return torch.compile(model.forward, **keywords)
        if case.entrance == "own_forward":
            model.forward = functools.partial(type(model).forward, model)  # type: ignore[method-assign]
        return torch.compile(model, **keywords)

    def train(self) -> int:
        theirs = [_optimizer(self.case, plain.values) for plain in self._plains()]
        for step in range(self.case.steps):
            if self.case.thaw and step == 1:
                for model in (self.model, *(plain.values for plain in self._plains())):
                    _thaw(model)
            self._run(self._backward, step)
            self._compare(f"step {step}", grads=True)
            self.optimizer = self.optimizer or _optimizer(self.case, self.model)
            for optimizer in (self.optimizer, *theirs):
                optimizer.step()
                optimizer.zero_grad(set_to_none=not self.case.zeroes)
            self._compare(f"after step {step}", grads=False)
            if self.case.writes:
                write(self.case.writes, self.model, *(plain.values for plain in self._plains()))
                self._compare(f"written after step {step}", grads=False)
            if self.case.evaluation:
                self._evaluate(step)
        if self.case.stale:
            self._run(self._backward_of_old_values)
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    def _run(self, function: Callable[..., None], *args: Any) -> None:
        if not self.case.thread:
            return function(*args)
        # Every thread has its own Dynamo configuration.
        with ThreadPoolExecutor(1, initializer=_allow_recompiles) as pool:
            pool.submit(function, *args).result()

    def _backward_of_old_values(self) -> None:
        """Change parameters before backward; expect an error or gradients for the old values."""
        x, given = batch(self.case, self.case.steps, 0, self.rank), flag(self.case, 0, 0)
        before = [plain.begin_step() for plain in self._plains()]
        loss = compute_loss(self.case, self.compiled, x, given)
        for plain, grads in zip(self._plains(), before):
            plain.loss(x, given).backward()
            plain.collect()
            plain.reduce(grads)
        with torch.no_grad():
            for param in self.model.parameters():
                if param.is_floating_point():
                    param.mul_(0.9)
        try:
            loss.backward()
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error), error
        else:
            self._compare("of old values", grads=True)

    def _plains(self) -> list[Plain]:
        return [self.plain, *([self.exact] if self.exact else [])]

    def _backward(self, step: int) -> None:
        before = [plain.begin_step() for plain in self._plains()]
        for micro in range(self.case.micros):
            last = micro == self.case.micros - 1 or self.case.reduces_micros
            x, given = batch(self.case, step, micro, self.rank), flag(self.case, step, micro)
            with contextlib.nullcontext() if last else graphshard.no_sync(self.model):
                ours = compute_loss(self.case, self.compiled, x, given)
                ours.backward()
            theirs = []
            for plain in self._plains():
                theirs.append(plain.loss(x, given))
                theirs[-1].backward()
                plain.collect()
            self._note(f"loss of step {step}, microbatch {micro}", ours, *theirs, scale=LOSS)
        for plain, grads in zip(self._plains(), before):
            plain.reduce(grads)

    def _evaluate(self, step: int) -> None:
        x = batch(self.case, step, 100, self.rank)
        mode = torch.no_grad if self.case.evaluation == "no_grad" else torch.inference_mode
        models = [(self.model, self.compiled), *((p.computes, p) for p in self._plains())]
        results = []
        for plain in self._plains():
            plain.begin_step()
        for module, run in models:
            case = run.case if isinstance(run, Plain) else self.case
            module.eval()
            with mode():
                results.append(compute_loss(case, run, x, True))
            module.train()
        self._note(f"evaluation after step {step}", *results, scale=LOSS)
        self._raise_together()

    def _compare(self, when: str, *, grads: bool) -> None:
        """Compare buffers, and gradients or parameters; on an error of any rank, raise on all."""
        theirs = [dict(plain.values.named_parameters()) for plain in self._plains()]
        largest = max(
            (float(p.grad.norm()) for p in theirs[0].values() if p.grad is not None), default=0.0
        )
        ours = dict(self.model.named_parameters())
        assert list(ours) == list(theirs[0])
        for name, param in theirs[0].items():
            params = [named[name] for named in theirs]
            if ours[name].requires_grad != param.requires_grad:
                self.faults.append(f"{name}.requires_grad is {ours[name].requires_grad}")
            if grads:
                expected = [p.grad for p in params]
                self._note(f"{name}.grad, {when}", ours[name].grad, *expected, scale=largest)
            else:
                self._note(f"{name}, {when}", ours[name], *params, scale=1.0)
        for name, buffer in self.model.named_buffers():
            buffers = [plain.computes.get_buffer(name) for plain in self._plains()]
            self._note(f"{name}, {when}", buffer, *buffers, scale=1.0)
        self._raise_together()

    def _note(
        self,
        what: str,
        ours: Tensor | None,
        theirs: Tensor | None,
        exact: Tensor | None = None,
        *,
        scale: float = 0.0,
    ) -> None:
        """Record an error if `ours` is too far from `theirs`.

        Errors are relative to the norm of `theirs`, or to ``FLOOR * scale`` if that is larger. If
        `exact` is given, twice the error of `theirs` is allowed, too.
        """
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
        size = max(_norm(theirs), FLOOR * scale, 1e-12)
        difference = _distance(full, theirs)
        allowed = TOLERANCE.get(self.case.precision, ROUGH) * size
        if exact is not None:
            allowed = max(allowed, 2 * _distance(theirs, exact))
        if not difference <= allowed:
            values = f", {full.item()} instead of {theirs.item()}" if full.numel() == 1 else ""
            self.faults.append(f"{what}: relative error {difference / size:.1e}{values}")

    def _raise_together(self) -> None:
        found: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(found, self.faults)
        if any(found):
            texts = [f"rank {rank}: {text}" for rank, f in enumerate(found) for text in f[:4]]
            raise AssertionError("; ".join(texts))


def _norm(tensor: Tensor) -> float:
    kind = torch.complex128 if tensor.is_complex() else torch.float64
    return float(tensor.detach().to(kind).norm())


def _distance(one: Tensor, other: Tensor) -> float:
    kind = torch.complex128 if other.is_complex() else torch.float64
    return _norm(one.detach().to(kind) - other.detach().to(kind))


def _thaw(model: nn.Module) -> None:
    floats = [p for n, p in model.named_parameters() if n.startswith("blocks.")]
    for i, param in enumerate(p for p in floats if p.is_floating_point()):
        param.requires_grad_(i != 0)


def _optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    if case.optimizer == "adamw":  # large eps: suppresses gradients of pure rounding error
        return torch.optim.AdamW(params, lr=0.01, eps=1e-2, foreach=False if case.ignored else None)
    momentum = 0.9 if case.optimizer == "momentum" else 0.0
    return torch.optim.SGD(
        params, lr=0.05, momentum=momentum, foreach=False if case.ignored else None
    )


def _meshes(case: Case) -> tuple[DeviceMesh, DeviceMesh | None]:
    names = ("replicate", "shard")[-len(case.mesh) :]
    if case.splits == 1:
        return init_device_mesh("cpu", case.mesh, mesh_dim_names=names), None
    mesh = init_device_mesh("cpu", (*case.mesh, case.splits), mesh_dim_names=(*names, "tp"))
    return mesh[names], mesh["tp"]


def _options(case: Case, model: nn.Module) -> dict[str, Any]:
    options: dict[str, Any] = {
        "reshard_after_forward": case.reshard,
        "compiler": case.compiler,
        "schedule": graphshard.SchedulePolicy(**dict(case.schedule)),
        "sync_module_states": case.sync,
        "ignored_params": ignored_params(case, model),
        "overrides": _overrides(case, model),
    }
    if case.precision in POLICIES:
        options["mp_policy"] = POLICIES[case.precision]
    if case.precision == "fp8":
        options["fp8"] = graphshard.Float8Policy(filter_fn=fits_fp8)
    if case.offload == "shards":
        options["offload_policy"] = CPUOffloadPolicy()
    return options


def _overrides(case: Case, model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the overrides that match a parameter, in the format of ``graphshard.backend``."""
    ignored = set(map(id, ignored_params(case, model)))
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
