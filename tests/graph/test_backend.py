from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import graphshard
from graphshard.kinds import TransferKind
from graphshard.pipeline import run_passes
from graphshard.pipeline.settings import baked_in
from graphshard.planning.plan import Plan
from graphshard.show.dump_folder import PAGE
from tests.graph.conftest import WORLD_SIZE
from tests.models import GPT, MLP
from tests.plan.dumps import fqns_of


def _backend(mesh: DeviceMesh, compiler: str = "aot_eager") -> graphshard.Backend:
    return graphshard.backend(mesh, compiler=compiler)


def _fqns(plan: Plan, kind: str) -> list[str]:
    buckets = [bucket for bucket in plan.buckets if bucket.kind == kind]
    return sorted(fqn for bucket in buckets for fqn in fqns_of(plan, bucket))


def _padded_bytes(model: nn.Module) -> int:
    return sum(
        -(-p.shape[0] // WORLD_SIZE) * WORLD_SIZE * (p.numel() // p.shape[0]) * 4
        for p in model.parameters()
    )


def test_training_step_has_forward_and_backward_plans(mesh: DeviceMesh) -> None:
    model, backend = MLP(), _backend(mesh)
    num_bytes, names = _padded_bytes(model), sorted(dict(model.named_parameters()))
    loss = torch.compile(model, backend=backend, fullgraph=True)(torch.ones(5, 7))
    assert [plan.graph for plan in backend.plans][:1] == ["forward"]
    loss.backward()
    forward, backward = backend.plans
    assert (forward.graph, backward.graph) == ("forward", "backward")
    assert (
        _fqns(forward, TransferKind.ALL_GATHER)
        == _fqns(backward, TransferKind.REDUCE_SCATTER)
        == names
    )
    kept = [forward.params[i].fqn for i in forward.kept]
    assert kept == ["down.weight"]  # backward needs it first
    assert _fqns(backward, TransferKind.ALL_GATHER) == ["mid.weight"]
    assert (
        forward.num_bytes(TransferKind.ALL_GATHER)
        == backward.num_bytes(TransferKind.REDUCE_SCATTER)
        == num_bytes
    )
    assert all(bucket.world == WORLD_SIZE for plan in backend.plans for bucket in plan.buckets)


def test_plans_describe_parameters(mesh: DeviceMesh) -> None:
    backend = _backend(mesh)
    torch.compile(MLP(), backend=backend)(torch.ones(5, 7)).backward()
    for plan in backend.plans:
        described = {param.fqn: param for param in plan.params}
        weight = described["mid.weight"]
        assert (weight.shape, weight.padded_rows) == ((11, 13), 2)
        assert weight.dtype == "torch.float32"


class WrappedFirst(nn.Module):
    """A model whose first parameter is a frozen tensor subclass, which AOTAutograd unwraps."""

    def __init__(self) -> None:
        super().__init__()
        wrapped = TwoTensor(torch.randn(7, 7), torch.randn(7, 7))
        self.frozen = nn.Parameter(wrapped, requires_grad=False)
        self.trained = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trained((x @ self.frozen).a).square().mean()


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_tensor_subclass_does_not_shift_parameter_names(mesh: DeviceMesh, compiler: str) -> None:
    model = WrappedFirst()
    backend = graphshard.backend(mesh, compiler=compiler, ignored_params=[model.frozen])
    torch.compile(model, backend=backend, fullgraph=True)(torch.ones(5, 7)).backward()
    for plan in backend.plans:
        assert sorted(param.fqn for param in plan.params) == ["trained.bias", "trained.weight"]


def test_tied_weight_is_one_parameter_in_plan(mesh: DeviceMesh) -> None:
    backend = _backend(mesh)
    ids = GPT.batch(torch.Generator())
    torch.compile(GPT(), backend=backend, fullgraph=True)(ids).backward()
    for plan in backend.plans:
        names = [param.fqn for param in plan.params]
        assert names.count("tokens.weight") == 1 and "head.weight" not in names
    assert _fqns(backend.plans[1], TransferKind.REDUCE_SCATTER).count("tokens.weight") == 1


def test_gradients_of_scalars_are_all_reduced(mesh: DeviceMesh) -> None:
    model = nn.Linear(3, 3)
    model.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
    model.forward = lambda x: (x @ model.weight * model.scale + model.bias).sum()  # type: ignore[method-assign]
    backend = _backend(mesh)
    torch.compile(lambda x: model(x), backend=backend)(torch.ones(2, 3)).backward()
    assert _fqns(backend.plans[1], TransferKind.ALL_REDUCE) == ["scale"]
    assert backend.plans[1].num_bytes(TransferKind.ALL_REDUCE) == 4


def test_evaluation_has_its_own_plan(mesh: DeviceMesh) -> None:
    backend = _backend(mesh)
    compiled = torch.compile(MLP(), backend=backend)
    with torch.no_grad():
        compiled(torch.ones(5, 7))
    assert [plan.graph for plan in backend.plans] == ["inference"]
    compiled(torch.ones(5, 7)).backward()
    assert [plan.graph for plan in backend.plans] == ["inference", "forward", "backward"]


def test_backend_has_no_plans_before_compilation(mesh: DeviceMesh) -> None:
    backend = _backend(mesh)
    assert backend.plans == []
    assert "no graph" in backend.summary()
    assert not any(backend.metrics().values())


def test_summary_counts_parameters_and_bytes(mesh: DeviceMesh) -> None:
    model, backend = MLP(), _backend(mesh)
    num_params, num_bytes = len(list(model.parameters())), _padded_bytes(model)
    torch.compile(model, backend=backend)(torch.ones(5, 7)).backward()
    tables = backend.summary().split("\n\n\n")
    assert [text.split()[0] for text in tables] == ["forward", "backward"]
    for text, plan, kind in zip(
        tables, backend.plans, (TransferKind.ALL_GATHER, TransferKind.REDUCE_SCATTER)
    ):
        assert f": {num_params} parameters, " in text
        (row,) = (line.split() for line in text.splitlines() if line.startswith(kind))
        assert row[1:4] == [str(num_params), "->", str(plan.count(kind))]
        assert float(row[4]) == pytest.approx(num_bytes / 1e6, abs=1e-3)


def test_metrics_match_plans(mesh: DeviceMesh) -> None:
    backend = _backend(mesh)
    compiled = torch.compile(MLP(), backend=backend)
    compiled(torch.ones(5, 7)).backward()
    once = backend.metrics()
    for kind in TransferKind:
        assert once[f"{kind}_bytes"] == sum(plan.num_bytes(kind) for plan in backend.plans)
    assert once["predicted_exposure"] == backend.predicted_exposure() > 0
    assert 0 < once["predicted_exposed_us"] < once["predicted_us"]
    assert once["predicted_peak_bytes"] > 0 and once["compile_s"] > 0
    assert (once["num_compiles"], once["num_recompiles"]) == (1, 0)
    compiled(torch.ones(6, 7)).backward()  # a new size: Dynamo recompiles with dynamic shapes
    twice = backend.metrics()
    assert (twice["num_compiles"], twice["num_recompiles"]) == (2, 1)
    assert twice["compile_s"] > once["compile_s"] and twice["num_cache_hits"] == 0
    with pytest.raises(ValueError, match="steps=None: pass the number of steps since the last"):
        backend.metrics(tokens=1)
    for forward, backward in zip(backend.plans[::2], backend.plans[1::2]):
        # The first layer has no gradient with respect to its input.
        rows, products_us = 7 * 13, 7 * 13 + 13 * 11 + 11 * 3
        ratio = backward.problem.peak_us / forward.problem.peak_us
        assert ratio == pytest.approx(2 - rows / products_us)
    assert repr(backend) == "<graphshard.Backend: ZeRO-3 over 8 ranks, 4 graphs compiled>"
    torch._dynamo.reset()
    compiled(torch.ones(5, 7)).backward()
    thrice = backend.metrics()
    assert (thrice["num_compiles"], thrice["num_recompiles"]) == (3, 1)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_mfu_excludes_recomputation_by_checkpoints(mesh: DeviceMesh, use_reentrant: bool) -> None:
    def peak_s(call: Callable[..., torch.Tensor]) -> float:
        torch._dynamo.reset()
        backend = _backend(mesh)
        compiled = torch.compile(MLP(), backend=backend)
        backend.metrics(steps=1)
        for _ in range(2):
            call(compiled, torch.ones(5, 7, requires_grad=True)).backward()
        found = backend.metrics(steps=1)
        return found["mfu"] * found["step_s"]

    plain = peak_s(lambda compiled, x: compiled(x))
    recomputed = peak_s(lambda block, x: checkpoint(block, x, use_reentrant=use_reentrant))
    assert plain > 0 and recomputed == pytest.approx(plain)


def test_failed_compilation_keeps_its_number_and_dumps(mesh: DeviceMesh, tmp_path: Path) -> None:
    stale = ["07-backward.json", "07-saving.txt", "07-keep-forward.before.py", PAGE]
    kept = ["03-notes.json", "step.json", "step.trace.json"]  # profiles, and the user's own files
    for name in (*stale, *kept):
        (tmp_path / name).write_text("of an earlier run")
    model = MLP()
    backend = graphshard.backend(mesh, compiler="aot_eager", dump=tmp_path)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    verify = run_passes.verify_lowered

    def fail_in_backward(graph: fx.Graph, plan: Plan) -> None:
        verify(graph, plan)
        if plan.graph == "backward":
            raise AssertionError("planted")

    with (
        mock.patch.object(run_passes, "verify_lowered", fail_in_backward),
        pytest.raises(Exception, match="planted"),
    ):
        compiled(torch.ones(5, 7))
    assert (tmp_path / "00-forward.json").exists() and (tmp_path / "00-forward.txt").exists()
    assert not (tmp_path / "00-backward.json").exists()
    with torch.no_grad():
        compiled(torch.ones(5, 7))
    assert (tmp_path / "01-inference.json").exists()
    assert not any((tmp_path / name).exists() for name in stale if name != PAGE)
    assert "of an earlier run" not in (tmp_path / PAGE).read_text()
    assert all((tmp_path / name).exists() for name in kept)


_calls: list[str] = []


@torch.library.custom_op("graphshard_tests::call", mutates_args=())
def _call(name: str) -> None:
    _calls.append(name)


@_call.register_fake
def _(name: str) -> None:
    pass


fx.node.has_side_effect(torch.ops.graphshard_tests.call.default)


class _Calls(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _call("forward")
        return super().forward(x).sum()


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_operator_without_tensors_runs(mesh: DeviceMesh, compiler: str) -> None:
    # For example ``torch.cuda.synchronize``.
    _calls.clear()
    model = torch.compile(_Calls(7, 3), backend=_backend(mesh, compiler), fullgraph=True)
    model(torch.ones(5, 7)).backward()
    assert _calls == ["forward"]
    with torch.no_grad():
        model(torch.ones(5, 7))
    assert _calls == ["forward"] * 2


@pytest.fixture
def default_precision() -> Iterator[None]:
    before = _CUDA.fp32_precision, _CPU.fp32_precision
    yield
    torch.set_float32_matmul_precision("highest")
    _CUDA.fp32_precision, _CPU.fp32_precision = before


_CUDA: Any = torch.backends.cuda.matmul
_CPU: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
PRECISIONS: dict[str, tuple[Callable[[], Any], bool]] = {
    "legacy": (lambda: torch.set_float32_matmul_precision("high"), True),
    "cuda": (lambda: setattr(_CUDA, "fp32_precision", "tf32"), True),
    "cpu": (lambda: setattr(_CPU, "fp32_precision", "bf16"), False),
}


@pytest.mark.parametrize(("change", "tf32"), PRECISIONS.values(), ids=PRECISIONS)
def test_precision_of_products_may_be_set_by_either_api(
    mesh: DeviceMesh, default_precision: None, change: Callable[[], Any], tf32: bool
) -> None:
    def modes() -> str:
        return baked_in([], [], torch.device("cpu"), {})

    before = modes()
    change()
    assert modes() != before
    schedule = graphshard.SchedulePolicy(hardware="H100")
    assert schedule.cost_model(torch.device("cuda")).tf32 == tf32
    torch.compile(MLP(), backend=_backend(mesh))(torch.ones(5, 7)).backward()


def test_precompile_cache_is_refused_before_sharding(mesh: DeviceMesh) -> None:
    model = MLP()
    with torch._dynamo.config.patch(caching_precompile=True):
        with pytest.raises(ValueError, match=r"^graphshard does not support caching_precompile"):
            torch.compile(model, backend=_backend(mesh))(torch.ones(5, 7))
        assert not any(isinstance(param, DTensor) for param in model.parameters())
        torch.compile(MLP(), backend="aot_eager")(torch.ones(5, 7)).backward()
    torch.compile(model, backend=_backend(mesh))(torch.ones(5, 7)).backward()


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_freezing_is_ignored_with_warning(mesh: DeviceMesh, compiler: str) -> None:
    model, backend = GPT(), _backend(mesh, compiler)
    ids = GPT.batch(torch.Generator())
    with torch._inductor.config.patch(freezing=True):
        with torch.no_grad(), pytest.warns(UserWarning, match="without freezing=True, .*constants"):
            torch.compile(model, backend=backend, fullgraph=True)(ids)
        assert torch._inductor.config.freezing
    (plan,) = backend.plans
    assert _fqns(plan, TransferKind.ALL_GATHER) == sorted(dict(model.named_parameters()))


def test_compiled_autograd_is_refused(mesh: DeviceMesh) -> None:
    model = MLP()

    def step(x: torch.Tensor) -> None:
        model(x).backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        with pytest.raises(ValueError, match=r"^graphshard does not support compiled autograd"):
            torch.compile(step, backend=_backend(mesh))(torch.ones(5, 7))
        torch.compile(MLP(), backend=_backend(mesh))(torch.ones(5, 7)).backward()
