"""Training in mxfp8, compared with torchao. Both emulate the matmuls on a CPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import graphshard
from graphshard.kinds import TransferKind
from graphshard.ops import mx_math
from graphshard.ops.mx_math import BLOCK, MXFP8
from graphshard.ops.nodes import run
from tests import ranks
from tests.numerics.compare import (
    History,
    assert_equal,
    assert_history_rounded,
    compile_sharded,
    generator,
    train_steps,
    whole,
    world_mesh,
)
from tests.ranks import on_ranks

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
FP8 = graphshard.Float8Policy(MXFP8)
DIM = 64


class Net(nn.Module):
    """MLP that uses a weight outside its linear, too, and whose head is not in fp8."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(DIM, 3 * DIM), nn.Linear(3 * DIM, DIM)
        self.lm_head = nn.Linear(DIM, 48)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(F.gelu(self.up(x)))
        return self.lm_head(x).square().mean() + self.up.weight.square().mean()


class LinearOfTorchao(nn.Linear):
    """Linear whose matmuls torchao emulates."""

    def forward(self, x: Tensor) -> Tensor:
        from torchao.prototype.moe_training.mxfp8_linear import mx_mm
        from torchao.prototype.mx_formats import config
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

        y = mx_mm.apply(
            x,
            self.weight,
            *[torch.float8_e4m3fn] * 3,
            BLOCK,
            KernelPreference.EMULATED,
            config.MXFP8Dim0CastKernelChoice.TORCH,
            config.MXFP8Dim1CastKernelChoice.TORCH,
            config.ScaleCalculationMode.RCEIL,
            False,
        )
        return y + self.bias.to(y.dtype)


def _batches(rows: int) -> list[Tensor]:
    seeds = [(step, dist.get_rank()) for step in range(3)]
    return [torch.randn(rows, DIM, generator=generator(*seed)) for seed in seeds]


def _by_fsdp2(model: Net, batches: list[Tensor], policy: MixedPrecisionPolicy) -> History:
    for linear in (model.up, model.down):
        linear.__class__ = LinearOfTorchao
    fully_shard(model, mesh=world_mesh(), mp_policy=policy)
    return train_steps(model, model, batches)


def _against_torchao(compiler: str, mp_policy: MixedPrecisionPolicy) -> None:
    # torchao does not pad, so the number of rows must be a multiple of the block size.
    ours, batches = Net(), _batches(2 * BLOCK)
    compiled = compile_sharded(ours, compiler=compiler, mp_policy=mp_policy, fp8=FP8)
    trained = train_steps(compiled, ours, batches)
    expected = _by_fsdp2(Net(), batches, mp_policy)
    if compiler == "aot_eager":
        assert_equal(trained, expected)
    else:
        model = Net()
        fully_shard(model, mesh=world_mesh())
        assert_history_rounded(trained, expected, train_steps(model, model, batches))


@pytest.mark.low_precision
@pytest.mark.parametrize(
    ("compiler", "mp_policy"),
    [("aot_eager", MixedPrecisionPolicy()), ("aot_eager", BF16), ("inductor", BF16)],
    ids=["float32", "bf16", "bf16-inductor"],
)
def test_training_matches_fsdp2_with_torchao(compiler: str, mp_policy: Any) -> None:
    ranks.run(2, _against_torchao, compiler, mp_policy)


@pytest.mark.low_precision
def test_training_with_few_rows_per_rank_matches_fsdp2_with_torchao() -> None:
    ranks.run(4, _against_torchao, "aot_eager", BF16)  # 16 rows of "down.weight" per rank


def _by_torchao(x: Tensor) -> tuple[Tensor, Tensor]:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    exponents, values = to_mx(x, torch.float8_e4m3fn, BLOCK, ScaleCalculationMode.RCEIL)
    return exponents.view(torch.uint8), values.view(torch.uint8)


@given(st.integers(-100, 100), st.sampled_from([torch.float32, torch.bfloat16]))
def test_blocks_match_torchao(exponent: int, dtype: torch.dtype) -> None:
    x = (torch.randn(64, 96, generator=generator(exponent + 100)) * 2.0**exponent).to(dtype)
    x[3], x[5, :BLOCK] = 0, 2.0**exponent  # zeros; a maximum that is a power of two
    for blocks, matrix in ((mx_math.by_rows(run, x), x), (mx_math.by_columns(run, x), x.t())):
        exponents, values = _by_torchao(matrix.contiguous())
        assert torch.equal(blocks.exponents, exponents)
        assert torch.equal(blocks.values.view(torch.uint8), values)


@pytest.mark.parametrize("rows", [1, 128, 130])
@pytest.mark.parametrize("columns", [1, 4, 7])
def test_order_of_scales_matches_torchao(rows: int, columns: int) -> None:
    from torchao.prototype.mx_formats.utils import to_blocked

    exponents = torch.randint(255, (rows, columns), generator=generator(0)).to(torch.uint8)
    tiled = mx_math._tiled(run, exponents)
    assert tiled.dtype == torch.float8_e8m0fnu
    assert torch.equal(tiled.view(torch.uint8), to_blocked(exponents).flatten())


def test_rows_are_padded_with_zeros() -> None:
    grad, x = torch.randn(40, DIM), torch.randn(40, 96)
    padded = (F.pad(part, (0, 0, 0, 24)) for part in (grad, x))
    assert torch.equal(mx_math.grad_weight(run, grad, x), mx_math.grad_weight(run, *padded))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_reach_the_result(value: float) -> None:
    x = torch.randn(2, DIM)
    x[0, 3] = value
    y = mx_math.times_transposed(run, x, mx_math.by_rows(run, torch.randn(BLOCK, DIM)))
    assert y.isfinite().any(1).tolist() == [False, True]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("columns", [96, 512])  # packed rows of 99 and of 33 * 16 bytes
def test_packed_shards_unpack_to_blocks_of_full_weight(dim: int, columns: int) -> None:
    weight = torch.randn(2 * DIM, columns)
    packed = torch.cat([mx_math.packed(run, shard, dim) for shard in weight.chunk(2)])
    assert packed.shape == mx_math.packed_shape(weight.shape)
    blocks = mx_math.unpacked(run, packed, dim)
    expected = (mx_math.by_columns, mx_math.by_rows)[dim](run, weight)
    assert torch.equal(blocks.values.view(torch.uint8), expected.values.view(torch.uint8))
    assert torch.equal(blocks.exponents, expected.exponents)


def _gathers(model: nn.Module, **options: Any) -> list[tuple[dict[str, tuple[str, int]], str]]:
    """Return each graph's all-gathers, as (dtype, bytes) by parameter, and its plan's reasons."""
    options = {"mesh": world_mesh(), "mp_policy": BF16, **options}
    backend = graphshard.backend(compiler="aot_eager", fp8=FP8, **options)
    torch.compile(model, backend=backend)(_batches(40)[0]).sum().backward()
    gathers = []
    for plan in backend.plans:
        assert not plan.count(TransferKind.ALL_REDUCE_MAX)
        sent = [t for t in plan.problem.transfers if t.kind == TransferKind.ALL_GATHER]
        by_name = {plan.params[t.param].fqn: (t.dtype, t.num_bytes) for t in sent}
        gathers.append((by_name, str(plan.reasons)))
    return gathers


@on_ranks(2)
def test_weights_used_only_by_linears_are_gathered_in_mxfp8() -> None:
    gathers = _gathers(Net())
    for gathered, _ in gathers:
        assert gathered["down.weight"] == ("torch.uint8", 3 * DIM * DIM * 33 // 32)
    gathered, reasons = gathers[0]
    assert gathered["up.weight"] == ("torch.bfloat16", 3 * DIM * DIM * 2)
    assert "travels as torch.bfloat16 instead of mxfp8: aten" in reasons


@on_ranks(4)
def test_weights_that_cannot_be_gathered_in_mxfp8_name_the_reason() -> None:
    def reason(rows: int, **options: Any) -> str:
        gathers = _gathers(nn.Sequential(nn.Linear(DIM, rows)), **options)
        assert {dtype for by_name, _ in gathers for dtype, _ in by_name.values()} == {
            "torch.bfloat16"
        }
        return gathers[0][1]

    assert "the 16 rows of a rank are not a multiple of 32" in reason(DIM)
    kept = reason(128, reshard_after_forward=False)
    assert "backward uses the values gathered in forward" in kept
    assert "backward gathers it from fewer ranks" in reason(128, reshard_after_forward=2)
    schedule = graphshard.SchedulePolicy(activation_memory_budget=0.5)
    assert "ranks may differ in what backward recomputes" in reason(128, schedule=schedule)


@on_ranks(2)
def test_sizes_not_divisible_by_32_compute_in_bfloat16() -> None:
    losses = []
    for fp8 in (FP8, None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(48, DIM), nn.Linear(DIM, 48))
        backend = graphshard.backend(world_mesh(), compiler="aot_eager", mp_policy=BF16, fp8=fp8)
        compiled = torch.compile(model, backend=backend)
        loss = compiled(torch.ones(BLOCK, 48)).square().mean()
        loss.backward()
        losses.append(float(loss.detach()))
        if fp8 is not None:
            reasons = [why for _, why in backend.plans[0].reasons]
            assert len(reasons) == 2
            assert all("are not multiples of 32" in why for why in reasons)
        with torch.no_grad():
            losses.append(float(compiled(torch.ones(BLOCK, 48)).square().mean()))
    assert len(set(losses)) == 1


@on_ranks(1)
def test_autocast_weights_with_another_use_compute_in_mxfp8() -> None:
    gradients = []
    for fp8 in (FP8, None):
        model = Net()
        compiled = compile_sharded(model, compiler="aot_eager", fp8=fp8)
        with torch.autocast("cpu", torch.bfloat16):
            loss = compiled(_batches(BLOCK)[0])
        loss.backward()
        gradients.append(whole(model.up.weight.grad))
    assert not torch.equal(*gradients)
    assert F.cosine_similarity(*(g.flatten() for g in gradients), dim=0) > 0.99


class Recomputed(Net):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def _loss_and_gradients(model: Net, **options: Any) -> list[Tensor]:
    model.down.weight.requires_grad_(False)
    compiled = compile_sharded(model, compiler="aot_eager", mp_policy=BF16, fp8=FP8, **options)
    (x, *_) = _batches(40)
    loss = compiled(x)
    loss.backward()
    with torch.no_grad():
        assert torch.equal(compiled(x), loss)
    gradients = [whole(param.grad) for param in model.parameters() if param.requires_grad]
    return [loss.detach(), *gradients]


@on_ranks(2)
def test_recomputation_and_kept_weights_do_not_change_gradients() -> None:
    expected = _loss_and_gradients(Net())
    zero2 = {"reshard_after_forward": False}
    offload = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    cases = [(Recomputed, {}), *itertools.product((Net, Recomputed), (zero2, offload))]
    for kind, options in cases:
        actual = _loss_and_gradients(kind(), **options)
        assert len(actual) == len(expected)
        assert all(map(torch.equal, actual, expected)), (kind, options)


def _losses(dynamic: bool) -> list[float]:
    torch._dynamo.reset()
    model = Net()
    backend = graphshard.backend(world_mesh(), compiler="aot_eager", fp8=FP8)
    compiled = torch.compile(model, backend=backend, dynamic=dynamic)
    losses = []
    for rows in (64, 3):
        loss = compiled(_batches(rows)[0])
        loss.backward()
        losses += [
            float(loss.detach()),
            *(float(whole(p.grad).sum()) for p in model.parameters()),
        ]
    return losses


@on_ranks(2)
def test_dynamic_and_static_graphs_agree() -> None:
    assert _losses(dynamic=True) == _losses(dynamic=False)
