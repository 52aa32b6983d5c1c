"""Tensor-parallel models on one axis of a mesh, under graphshard and FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import graphshard
from tests.numerics.compare import generator


class MLP(nn.Module):
    """Two tensor-parallel linears, a plain norm, and a plain linear with few rows.

    On 2 x 2 ranks, shards of `up` and `out` are padded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 14), nn.Linear(14, 6)
        self.out = nn.Linear(6, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss for `x` `[5, 6]`."""
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.out(x).square().mean()

    @staticmethod
    def batch(rng: torch.Generator) -> Tensor:
        """Return inputs `[5, 6]`."""
        return torch.randn(5, 6, generator=rng)

    def parallelize(self, tp: DeviceMesh) -> MLP:
        """Split `up` by columns and `down` by rows, and leave the rest plain."""
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(self, tp, plan)
        return self


class Llama(nn.Module):
    """A Llama of `transformers` with sequence parallelism and a loss."""

    VOCAB = 22

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=self.VOCAB,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
        )
        self.lm = LlamaForCausalLM(config)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the loss for `ids` `[2, 6]`."""
        # For the whole sequence: this rank's embeddings are only a part of it.
        length = ids.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        positions = torch.arange(length)[None]
        logits = self.lm(input_ids=ids, attention_mask=mask, position_ids=positions).logits
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())

    @staticmethod
    def batch(rng: torch.Generator) -> Tensor:
        """Return token ids `[2, 6]`."""
        return torch.randint(Llama.VOCAB, (2, 6), generator=rng)

    def parallelize(self, tp: DeviceMesh) -> Llama:
        """Apply tensor and sequence parallelism as torchtitan does to its Llama."""
        seq = Shard(1)
        embed = RowwiseParallel(input_layouts=Replicate(), output_layouts=seq)
        head = ColwiseParallel(input_layouts=seq, output_layouts=Replicate())
        plan: dict[str, Any] = {"model.embed_tokens": embed, "model.norm": SequenceParallel()}
        parallelize_module(self.lm, tp, plan | {"lm_head": head})
        columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        columns += ("mlp.gate_proj", "mlp.up_proj")
        for layer in self.lm.model.layers:
            plan = {name: ColwiseParallel(input_layouts=seq) for name in columns}
            for name in ("self_attn.o_proj", "mlp.down_proj"):
                plan[name] = RowwiseParallel(output_layouts=seq)
            for name in ("input_layernorm", "post_attention_layernorm"):
                plan[name] = SequenceParallel()
            parallelize_module(layer, tp, plan)
        return self


def mesh_2d(dp: int = 2, tp: int = 2, device: str = "cpu") -> DeviceMesh:
    return init_device_mesh(device, (dp, tp), mesh_dim_names=("dp", "tp"))


def split(kind: Any, mesh: DeviceMesh) -> Any:
    """Return a model of this kind, parallelized over `mesh["tp"]`; same values at each call."""
    torch.manual_seed(0)
    return kind().to(mesh.device_type).parallelize(mesh["tp"])


def under_fsdp2(kind: Any, mesh: DeviceMesh, **options: Any) -> Any:
    """Return a model of `split`, sharded by FSDP2 over `mesh["dp"]`."""
    model = split(kind, mesh)
    fully_shard(model, mesh=mesh["dp"], **options)
    return model


def under_graphshard(
    kind: Any, mesh: DeviceMesh, *, compiler: str = "aot_eager", **options: Any
) -> tuple[Any, Any]:
    """Return a model of `split`, and its form compiled by graphshard over `mesh["dp"]`."""
    model = split(kind, mesh)
    backend = graphshard.backend(mesh["dp"], compiler=compiler, **options)
    return model, torch.compile(model, backend=backend, fullgraph=True)


def batches(kind: Any, mesh: DeviceMesh, steps: int = 3) -> list[Any]:
    """Return the batches of this rank, the same for all ranks along tp."""
    dp_rank = mesh["dp"].get_local_rank()
    data = [kind.batch(generator(step, dp_rank)) for step in range(steps)]
    return [batch.to(mesh.device_type) for batch in data]


def train(
    call: Callable[[Any], Tensor],
    model: nn.Module,
    batches: list[Any],
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
) -> list[dict[str, Any]]:
    """Train a model; return the loss and the gradients of each step."""
    history, optim = [], None
    for batch in batches:
        loss = call(batch)
        loss.backward()
        grads = {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
        history.append({"loss": loss.detach(), **grads})
        optim = optim or optimizer(model.parameters(), lr=0.05)  # the first call shards the model
        optim.step()
        optim.zero_grad()
    return history


def assert_like_fsdp2(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float = 0.0) -> None:
    """Assert equal local values, by default bitwise, and equal layouts of DTensors."""
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        mine = ours[name]
        assert isinstance(mine, DTensor) == isinstance(value, DTensor), name
        if isinstance(value, DTensor):
            assert mine.placements == value.placements, (name, mine.placements, value.placements)
            assert mine.device_mesh == value.device_mesh, (name, mine.device_mesh)
            assert (mine.shape, mine.stride()) == (value.shape, value.stride()), name
            mine, value = mine.to_local(), value.to_local()
        if tolerance == 0.0:
            assert torch.equal(mine, value), f"{name}: differs by {(mine - value).abs().max():.1e}"
        torch.testing.assert_close(mine, value, rtol=tolerance, atol=tolerance, msg=name)
