"""Build the training variants that the benchmarks compare, each from the same model.

The variants are plain torch.compile, DDP, FSDP2 in several forms (one with torchao's fp8), and
graphshard.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import FSDP2, FSDP2_BLOCKS, GRAPHSHARD, GRAPHSHARD_FP8, PLAIN, TORCHAO

if TYPE_CHECKING:
    from graphshard.dynamo_backend import Backend

Model: TypeAlias = Any
"""A module whose ``blocks`` FSDP2 shards one by one."""
Trained: TypeAlias = Any
"""A module to call in place of the model."""
Build = Callable[[Model, DeviceMesh], Trained]


def plain(model: Model, mesh: DeviceMesh) -> Trained:
    return torch.compile(model)


def fsdp2(model: Model, mesh: DeviceMesh, **options: Any) -> Trained:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def fsdp2_compiled_blocks(model: Model, mesh: DeviceMesh, **options: Any) -> Trained:
    for block in model.blocks:
        block.compile()
    return fsdp2(model, mesh, **options)


def asynchronous(
    model: Model, mesh: DeviceMesh, *, build: Callable[..., Trained], **options: Any
) -> Trained:
    """Build FSDP2 with asynchronous gathers; on CPUs it otherwise waits for each gather at once."""
    model = build(model, mesh, **options)
    model._set_unshard_async_op(True)
    return model


def fsdp2_torchao(model: Model, mesh: DeviceMesh, **options: Any) -> Trained:
    """Build FSDP2 with torchao's fp8. Blocks are compiled, which fuses torchao's casts."""
    convert_to_float8(model)
    return fsdp2_compiled_blocks(model, mesh, **options)


def convert_to_float8(model: Model) -> None:
    """Convert the linears that graphshard computes in fp8 to torchao's."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    from graphshard.options.float8_policy import is_inner_linear

    convert_to_float8_training(
        model,
        module_filter_fn=lambda linear, fqn: is_inner_linear(f"{fqn}.weight", linear.weight.shape),
        config=Float8LinearConfig(enable_fsdp_float8_all_gather=True),
    )


def add_hooks(name: str, model: Trained, optimizer: torch.optim.Optimizer) -> None:
    if name == TORCHAO:
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        optimizer.register_step_post_hook(
            lambda *_: precompute_float8_dynamic_scale_for_fsdp(model)
        )


def ddp(model: Model, mesh: DeviceMesh) -> Trained:
    return DistributedDataParallel(model, process_group=mesh.get_group())


def sharding(
    mesh: DeviceMesh, *, hardware: str = "auto", fp8: str | None = None, **options: Any
) -> Backend:
    """Return the backend of ``one_line``; ``fp8`` is the name of a recipe."""
    # Imported here, because it would add to the memory of a process that measures FSDP2.
    import graphshard

    schedule = graphshard.SchedulePolicy(hardware=hardware)
    policy = graphshard.Float8Policy(fp8) if fp8 else None
    return graphshard.backend(mesh, schedule=schedule, fp8=policy, **options)


def one_line(model: Model, mesh: DeviceMesh, **options: Any) -> Trained:
    return torch.compile(model, backend=sharding(mesh, **options))


VARIANTS: dict[str, Build] = {
    PLAIN: plain,
    FSDP2: fsdp2,
    FSDP2_BLOCKS: fsdp2_compiled_blocks,
    GRAPHSHARD: one_line,
}


# --- in several precisions -----------------------------------------------------------------------


def mp_policy(mixed: bool) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()


def sharded(device_type: str, *, mixed: bool, hardware: str = "auto") -> dict[str, Build]:
    """Return all variants of FSDP2 and of graphshard, plain graphshard last."""
    policy = mp_policy(mixed)
    builds: dict[str, Build] = {
        name: functools.partial(form, mp_policy=policy)
        for name, form in _forms(device_type, mixed).items()
    }
    ours = functools.partial(one_line, hardware=hardware)
    if mixed:
        builds[f"{GRAPHSHARD}, float32"] = ours
        builds[GRAPHSHARD_FP8] = functools.partial(ours, mp_policy=policy, fp8="tensorwise")
    return {**builds, GRAPHSHARD: functools.partial(ours, mp_policy=policy)}


def _forms(device_type: str, mixed: bool) -> dict[str, Callable[..., Trained]]:
    if device_type != "cuda":
        return {
            FSDP2: fsdp2,
            f"{FSDP2}, async": functools.partial(asynchronous, build=fsdp2),
            f"{FSDP2_BLOCKS}, async": functools.partial(asynchronous, build=fsdp2_compiled_blocks),
        }
    forms = {FSDP2: fsdp2, FSDP2_BLOCKS: fsdp2_compiled_blocks}
    has_torchao = importlib.util.find_spec("torchao") is not None
    return {**forms, TORCHAO: fsdp2_torchao} if mixed and has_torchao else forms
