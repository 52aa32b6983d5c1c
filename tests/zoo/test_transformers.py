from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

import graphshard
import graphshard.passes as passes
from graphshard.passes.casts import cast_before_gather
from tests import ranks, recording
from tests.numerics.compare import (
    assert_history_rounded,
    generator,
    graphshard_warnings,
    num_graphs,
    train_steps,
    world_mesh,
)
from tests.ranks import on_ranks

from .models import ZOO, Batch, causal_batch, gpt2_with_loss, model_loss
from .training import LEARNING_RATE, STEPS, bfloat16_autocast, by_fsdp2

NEW_TOKENS = 5


STRATEGIES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "ZeRO-3": ((2,), {}),
    "ZeRO-2": ((2,), {"reshard_after_forward": False}),
    "DDP": ((2,), {"overrides": {"*": {"shard": False}}}),
    "offloaded": ((2,), {"offload_policy": CPUOffloadPolicy()}),
    "HSDP": ((2, 2), {}),
    "hpZ": ((4,), {"reshard_after_forward": 2}),
}
"""(shape of the mesh, arguments of ``graphshard.shard``) by strategy."""


def _generate(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = ZOO["gpt2"].build().eval()
    prompt = causal_batch(torch.Generator().manual_seed(dist.get_rank()))["input_ids"]

    def continuation() -> torch.Tensor:
        # Fixed length, since all ranks must call the model equally often.
        settings = dict(do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS)
        with torch.inference_mode():
            tokens: torch.Tensor = model.generate(prompt, **settings)
        return tokens

    expected = continuation()
    shape, options = STRATEGIES[name]
    graphshard.shard(model, init_device_mesh("cpu", shape), **options)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return expected.clone(), continuation().clone()


@pytest.mark.parametrize("name", STRATEGIES)
def test_generated_text_equals_that_of_full_model(name: str) -> None:
    results = ranks.run(math.prod(STRATEGIES[name][0]), _generate, name)
    for expected, generated in results:
        assert expected.shape[1] == generated.shape[1]
        assert torch.equal(generated, expected)
    assert not torch.equal(results[0][0][:, -NEW_TOKENS:], results[1][0][:, -NEW_TOKENS:])


def _autocast_loss(model: Any, batch: Batch) -> torch.Tensor:
    with bfloat16_autocast():
        return model_loss(model, batch)


@pytest.mark.low_precision
@on_ranks(2)
def test_autocast_trains_like_fsdp2() -> None:
    mesh, rank = world_mesh(), dist.get_rank()
    batches = [causal_batch(generator(step, rank)) for step in range(STEPS)]
    torch.manual_seed(0)
    ours = ZOO["llama-shallow"].build()
    theirs, exact = (by_fsdp2(copy.deepcopy(ours), mesh, True) for _ in range(2))
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(ours, backend=graphshard.backend(mesh, compiler="aot_eager"))
    with graphshard_warnings() as texts:
        trained = train_steps(compiled, ours, batches, _autocast_loss, LEARNING_RATE)
    assert not texts and num_graphs() == 1
    expected = train_steps(theirs, theirs, batches, _autocast_loss, LEARNING_RATE)
    in_float32 = train_steps(exact, exact, batches, model_loss, LEARNING_RATE)
    assert_history_rounded(trained, expected, in_float32)


def _trained(pipeline: Sequence[passes.Pass]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = ZOO["llama-shallow"].build()
    compiled = torch.compile(model, backend=graphshard.backend(mesh, compiler="aot_eager"))
    with mock.patch.object(passes, "PIPELINE", pipeline), bfloat16_autocast():
        loss = compiled(**causal_batch(torch.Generator().manual_seed(dist.get_rank()))).loss
        loss.backward()
    return [loss.detach(), *(p.grad.full_tensor() for p in model.parameters())]


def _both_ways() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    late = tuple(one for one in passes.PIPELINE if one.run is not cast_before_gather)
    assert len(late) < len(passes.PIPELINE)
    return _trained(passes.PIPELINE), _trained(late)


def test_cast_before_gather_is_bitwise_equal() -> None:
    for early, late in ranks.run(2, _both_ways):
        assert all(map(torch.equal, early, late))


def _run_with_and_without_autocast() -> list[tuple[torch.dtype, dict[str, int]]]:
    """Return the dtype of logits, and the bytes gathered for each parameter in forward."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    backend = graphshard.backend(mesh, compiler="aot_eager")
    model = torch.compile(gpt2_with_loss(n_layer=1), backend=backend, fullgraph=True)
    batch = causal_batch(torch.Generator())
    found = []
    for context in (bfloat16_autocast, contextlib.nullcontext):
        with context():
            model(**batch).loss.backward()
        recording.clear()
        with context():
            dtype = model(**batch).logits.dtype
        plan, _backward = backend.plans[-2:]
        sent = {plan.params[t.param].fqn: t.num_bytes for t in plan.problem.transfers}
        assert sum(event.bytes for event in recording.collectives()) == sum(sent.values())
        found.append((dtype, sent))
    return found


def test_one_compiled_model_runs_with_and_without_autocast() -> None:
    found = ranks.run(2, _run_with_and_without_autocast, backend=recording.BACKEND)
    for (low, cast), (high, plain) in found:
        assert (low, high) == (torch.bfloat16, torch.float32)
        # Autocast halves the bytes, except for norms and embeddings; GPT-2 ties its embedding to
        # its output layer.
        for fqn, num_bytes in plain.items():
            as_it_is = any(part in fqn for part in ("wte", "wpe", "ln_"))
            assert cast[fqn] == (num_bytes if as_it_is else num_bytes / 2), fqn
