"""What users of `transformers` do beside a plain step: greedy generation with a sharded model, and
training under autocast."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import graphshard
from tests import ranks

from .models import ZOO, causal_batch
from .training import bfloat16_autocast, compare

NEW_TOKENS = 5


def _generate() -> tuple[torch.Tensor, torch.Tensor]:
    """The continuation of this rank's prompt by the full model and by the sharded one."""
    torch.manual_seed(0)
    model = ZOO["gpt2"].build().eval()
    prompt = causal_batch(torch.Generator().manual_seed(dist.get_rank()))["input_ids"]

    def continuation() -> torch.Tensor:
        # No early end: ranks have to call the model equally often.
        settings = dict(do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS)
        with torch.inference_mode():
            tokens: torch.Tensor = model.generate(prompt, **settings)
        return tokens

    expected = continuation()
    graphshard.shard(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return expected.clone(), continuation().clone()


def test_generate() -> None:
    results = ranks.run(2, _generate)
    for expected, generated in results:
        assert expected.shape[1] == generated.shape[1]
        assert torch.equal(generated, expected)
    assert not torch.equal(results[0][0][:, -NEW_TOKENS:], results[1][0][:, -NEW_TOKENS:])


def _dtypes_of_logits() -> list[torch.dtype]:
    """Under autocast and not, by one compiled model."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    backend = graphshard.backend(mesh, compiler="aot_eager")
    model = torch.compile(ZOO["llama"].build(), backend=backend, fullgraph=True)
    batch = causal_batch(torch.Generator())
    dtypes = []
    for context in (bfloat16_autocast, contextlib.nullcontext):
        with context():
            dtypes.append(model(**batch).logits.dtype)
    return dtypes


def test_autocast_reaches_the_graph() -> None:
    for dtypes in ranks.run(2, _dtypes_of_logits):
        assert dtypes == [torch.bfloat16, torch.float32]


def test_autocast() -> None:
    for rank in ranks.run(2, compare, "llama", autocast=True):
        assert rank.loss_error <= 2e-2
        assert rank.num_graphs == 1
        assert not rank.warnings
