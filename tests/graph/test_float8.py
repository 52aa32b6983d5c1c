from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import graphshard
from graphshard.kinds import GraphKind, TransferKind
from graphshard.ops import float8_math, float8_ops, markers
from graphshard.ops.float8_math import ALIGNMENT, RECIPES, ROWWISE, TENSORWISE
from graphshard.ops.marker_specs import UnshardSpec
from graphshard.ops.nodes import REASON
from graphshard.ops.nodes import run as call_now
from graphshard.passes.float8 import gather_float8
from graphshard.planning.plan import Plan
from tests.graph.builder import Builder, count, run, targets
from tests.graph.conftest import WORLD_SIZE
from tests.numerics.compare import NEEDS_FP8
from tests.plan.dumps import fqns_of

pytestmark = NEEDS_FP8
DIM, BATCH = 64, 32
E4M3 = "torch.float8_e4m3fn"
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class Net(nn.Module):
    """Three linears that share their input, an MLP with biases, and a head that is not in fp8."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.lm_head = nn.Linear(DIM, 48)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.q(x)) * self.k(x) + self.v(x)
        return self.lm_head(self.down(torch.relu(self.up(x)))).square().mean()


WEIGHTS = {f"{name}.weight" for name in ("q", "k", "v", "up", "down")}


def ones() -> Tensor:
    return torch.ones(BATCH, DIM, requires_grad=True)


def _plans(mesh: DeviceMesh, model: nn.Module, *batch: Tensor, **options: Any) -> dict[str, Plan]:
    options = {"compiler": "aot_eager", "fp8": graphshard.Float8Policy(), **options}
    backend = graphshard.backend(mesh, **options)
    loss = torch.compile(model, backend=backend, fullgraph=True)(*batch or [ones()])
    if loss.requires_grad:
        loss.backward()
    return {plan.graph: plan for plan in backend.plans}


def _gathered(plan: Plan) -> dict[str, str]:
    return {
        plan.fqn_of(t): t.dtype for t in plan.problem.transfers if t.kind == TransferKind.ALL_GATHER
    }


def _in_fp8(plan: Plan) -> set[str]:
    return {name for name, dtype in _gathered(plan).items() if dtype == E4M3}


@pytest.mark.parametrize("recipe", RECIPES)
def test_dynamic_rows_are_padded_on_gpu(recipe: str) -> None:
    env = ShapeEnv()
    rows = env.create_symintnode(env.create_unspecified_symbol(20, ConstantSource("n")), hint=20)
    with FakeTensorMode(shape_env=env), enable_python_dispatcher():  # as AOTAutograd does
        grad = torch.empty(rows, 32, dtype=torch.bfloat16, device="cuda")
        padded = float8_math.padded(call_now, grad, 0, ALIGNMENT)
        num_padded = padded.shape[0].node.expr
        product = float8_math.grad_weight(call_now, grad, grad.new_empty(rows, 64), recipe)
    assert product.shape == (32, 64)
    symbol = rows.node.expr
    assert [num_padded.subs(symbol, n) for n in (16, 17, 33)] == [16, 32, 48]
    assert all(guard.expr.subs(symbol, n) for guard in env.guards for n in (16, 17, 33))


@pytest.mark.parametrize(
    ("recipe", "mp_policy", "overlap"), [(TENSORWISE, None, True), (ROWWISE, BF16, False)]
)
def test_one_all_reduce_finds_scales_of_all_weights(
    mesh: DeviceMesh, recipe: str, mp_policy: Any, overlap: bool
) -> None:
    if float8_ops.float8_error("cpu", recipe):
        pytest.skip("this CPU has no such product")
    schedule = graphshard.SchedulePolicy(overlap=overlap)
    fp8 = graphshard.Float8Policy(recipe)
    plans = _plans(mesh, Net(), fp8=fp8, mp_policy=mp_policy, schedule=schedule)
    forward, backward = plans[GraphKind.FORWARD], plans[GraphKind.BACKWARD]
    (amax,) = [t for t in forward.problem.transfers if t.kind == TransferKind.ALL_REDUCE_MAX]
    rows = 3 * DIM + 2 * DIM + DIM
    assert amax.num_bytes == 4 * (len(WEIGHTS) if recipe == TENSORWISE else rows)
    assert forward.problem.compute_us[0] > 0  # the first step reads all shards to compute scales
    assert _in_fp8(forward) == WEIGHTS and set(_gathered(forward)) > WEIGHTS
    sizes = {forward.fqn_of(t): t.num_bytes for t in forward.problem.transfers}
    assert sizes["up.weight"] == 2 * DIM * DIM
    assert backward.count(TransferKind.ALL_REDUCE_MAX) == 0
    assert _in_fp8(backward) == WEIGHTS - {forward.params[i].fqn for i in forward.kept}
    launches = [bucket.kind for bucket in forward.buckets]
    in_fp8 = [not WEIGHTS.isdisjoint(fqns_of(forward, b)) for b in forward.buckets]
    assert launches.index(TransferKind.ALL_REDUCE_MAX) < in_fp8.index(True)


def test_inference_gathers_in_fp8(mesh: DeviceMesh) -> None:
    with torch.no_grad():
        plans = _plans(mesh, Net())
    assert (
        _in_fp8(plans[GraphKind.INFERENCE]) == WEIGHTS
        and plans[GraphKind.INFERENCE].count(TransferKind.ALL_REDUCE_MAX) == 1
    )


def test_weight_kept_unsharded_is_in_fp8(mesh: DeviceMesh) -> None:
    plans = _plans(mesh, Net(), reshard_after_forward=False)
    assert _in_fp8(plans[GraphKind.FORWARD]) == WEIGHTS and not _gathered(plans[GraphKind.BACKWARD])


def test_frozen_weight_is_gathered_in_fp8(mesh: DeviceMesh) -> None:
    model = Net()
    model.up.weight.requires_grad_(False)
    plans = _plans(mesh, model)
    assert _in_fp8(plans[GraphKind.FORWARD]) == WEIGHTS


@pytest.mark.filterwarnings("ignore:torch.utils.checkpoint")
def test_checkpointing_gathers_in_fp8_and_reuses_scales(mesh: DeviceMesh) -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    schedule = graphshard.SchedulePolicy(overlap=False)
    plans = _plans(mesh, Checkpointed(), schedule=schedule)
    assert _in_fp8(plans[GraphKind.FORWARD]) == _in_fp8(plans[GraphKind.BACKWARD]) == WEIGHTS
    assert plans[GraphKind.BACKWARD].count(TransferKind.ALL_REDUCE_MAX) == 0


def test_overrides_choose_fp8_weights_by_name(mesh: DeviceMesh) -> None:
    everything = graphshard.Float8Policy(filter_fn=lambda fqn, shape: True)
    overrides = {"q.*": {"fp8": None}, "lm_head.*": {"fp8": everything}}
    plans = _plans(mesh, Net(), overrides=overrides)
    assert _in_fp8(plans[GraphKind.FORWARD]) == WEIGHTS - {"q.weight"} | {"lm_head.weight"}


def test_weight_with_another_use_is_not_gathered_in_fp8(mesh: DeviceMesh) -> None:
    class Penalised(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.up.weight.square().mean()

    plan = _plans(mesh, Penalised())[GraphKind.FORWARD]
    assert _in_fp8(plan) == WEIGHTS - {"up.weight"}
    ((position, why),) = plan.reasons
    assert plan.params[position].fqn == "up.weight"
    use = r"aten.\S+ uses it other than as the weight of an fp8 linear"
    assert re.fullmatch(f"travels as torch.float32 instead of fp8: {use}", why)


def test_embedding_is_not_gathered_in_fp8(mesh: DeviceMesh) -> None:
    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.net = nn.Embedding(DIM, DIM), Net()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(self.tokens(x))

    plan = _plans(mesh, Embedding(), torch.arange(BATCH))[GraphKind.FORWARD]
    assert _in_fp8(plan) == {f"net.{name}" for name in WEIGHTS} and not plan.reasons


def test_fp8_works_under_autocast(mesh: DeviceMesh) -> None:
    class Autocast(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(x)

    plan = _plans(mesh, Autocast())[GraphKind.FORWARD]
    assert _in_fp8(plan) == WEIGHTS
    assert _gathered(plan)["lm_head.weight"] == "torch.bfloat16"


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "why"),
    [
        (32, 64, torch.bfloat16, None),
        (7, 64, torch.bfloat16, None),
        (0, 64, torch.bfloat16, None),
        (32, 40, torch.bfloat16, "tensorwise output of .* on cuda: .*divisible by 16"),
        (32, 64, torch.float16, "fp8 linears support only torch.bfloat16 and torch.float32"),
    ],
)
def test_weights_that_device_refuses_are_not_in_fp8(
    group: str, rows: int, columns: int, dtype: torch.dtype, why: str | None
) -> None:
    # Fake CUDA tensors determine what the device supports, without a GPU.
    gm = _linear(group, rows, columns, dtype)
    run(gather_float8, gm)
    gm.graph.lint()
    (marker,) = (node for node in gm.graph.nodes if node.target is markers.unshard)
    reason = marker.meta.get(REASON)
    if why is None:
        assert reason is None and marker.meta["val"].dtype == torch.float8_e4m3fn
        assert count(gm.graph, torch.ops.aten._scaled_mm.default) == 3
    else:
        assert re.search(why, reason) and marker.meta["val"].dtype == dtype
        assert count(gm.graph, torch.ops.aten.mm.default) == 3
        assert count(gm.graph, markers.max_over_ranks) == 0
    assert not set(float8_ops.PRODUCTS) & set(targets(gm.graph))
    for product in gm.graph.find_nodes(
        op="call_function", target=torch.ops.aten._scaled_mm.default
    ):
        # Inductor's GPU templates require both scales to have the same number of dims.
        assert [product.args[i].meta["val"].dim() for i in (2, 3)] == [0, 0]


def _linear(group: str, rows: int, columns: int, dtype: torch.dtype) -> fx.GraphModule:
    """Return a joint graph with the three matmuls of a linear on a GPU."""
    build = Builder(group, device="cuda")
    x, shard = build.primal(rows, DIM, dtype=dtype), build.primal(columns // 8, DIM, dtype=dtype)
    weight = build.marker(
        UnshardSpec(
            shard=shard,
            rows=columns,
            group=group,
            regather_group=group,
            float8_recipe=TENSORWISE,
        )
    )
    y = build.call(float8_ops.float8_mm, x, weight, TENSORWISE)
    grad_x = build.call(float8_ops.float8_mm_grad_input, y, weight, TENSORWISE)
    grad_w = build.call(float8_ops.float8_mm_grad_weight, y, weight, x, TENSORWISE)
    return build.module(y, grad_x, build.reduce(grad_w))


class _Layouts(TorchDispatchMode):
    """Dispatch mode that records the strides of fp8 matmul operands, also in compiled code."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten._scaled_mm:
            self.found.append((args[0].stride(), args[1].stride()))
        return func(*args, **kwargs or {})


class ByInductor(NamedTuple):
    """Code and plan of each graph of a step in bfloat16 and fp8, and strides of fp8 operands."""

    codes: list[str]
    plans: list[Plan]
    layouts: list[tuple[tuple[int, ...], tuple[int, ...]]]


@pytest.fixture(scope="module")
def by_inductor(_group: None) -> ByInductor:
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    backend = graphshard.backend(mesh, fp8=graphshard.Float8Policy(), mp_policy=BF16)
    model = torch.compile(Net(), backend=backend, fullgraph=True)
    with torch._inductor.config.patch(force_disable_caches=True), _Layouts() as layouts:
        _, codes = run_and_get_code(lambda: model(ones()).backward())
    return ByInductor(codes, backend.plans, layouts.found)


def test_one_kernel_prepares_fp8_shards_of_bucket(by_inductor: ByInductor) -> None:
    # The kernel scales, casts and packs the shards; one call copies in the rest of the bucket, in
    # bfloat16.
    codes, plans = by_inductor.codes, by_inductor.plans
    assert len(codes) == len(plans) == 2
    for code, plan in zip(codes, plans):
        body = code[code.index("def call(") :]
        kernels = [args.split(", ") for args in re.findall(r"cpp_fused\w*\((.*?)\)", body)]
        buckets = [b for b in plan.buckets if b.kind == TransferKind.ALL_GATHER]
        gathered = {fqn for b in buckets for fqn in fqns_of(plan, b)}
        in_fp8 = [p for p in plan.params if p.fqn in WEIGHTS & gathered]
        shards = {f"primals_{param.input + 1}" for param in in_fp8}
        readers = [shards & set(args) for args in kernels if shards & set(args)]
        assert sum(map(len, readers)) == len(shards) > 1  # each shard is read once
        assert len(readers) == sum(not WEIGHTS.isdisjoint(fqns_of(plan, b)) for b in buckets)
        for call in re.findall(r"copy_in\.default\(\[(.*?)\]", body):
            assert not shards & set(call.split(", "))


def test_inductor_lays_out_fp8_operands_for_cublaslt(by_inductor: ByInductor) -> None:
    if float8_ops.float8_error("cpu", TENSORWISE):
        pytest.skip("this CPU has no such product")
    assert len(by_inductor.layouts) == 3 * len(WEIGHTS)
    for left, right in by_inductor.layouts:
        assert left[1] == 1 and right[0] == 1, (left, right)


def test_linears_with_same_input_share_its_cast(by_inductor: ByInductor) -> None:
    if float8_ops.float8_error("cpu", TENSORWISE):
        pytest.skip("this CPU has no such product")
    inputs = re.findall(r"extern_kernels\._scaled_mm\((\w+),", by_inductor.codes[0])
    assert len(inputs) == len(WEIGHTS) and len(set(inputs)) == len({"q, k, v", "up", "down"})
