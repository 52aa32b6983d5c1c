"""Context parallelism: each rank has a part of every sequence; keys and values are gathered."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import graphshard
from tests.numerics.compare import generator, whole
from tests.ranks import on_ranks

LENGTH = 8


class Attention(nn.Module):
    """Causal attention with a loss; with `cp`, this rank has a part of each sequence."""

    def __init__(self, cp: DeviceMesh | None) -> None:
        super().__init__()
        self.qkv, self.out, self.cp = nn.Linear(6, 18), nn.Linear(6, 5), cp

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss for `x` `[2, LENGTH / cp, 6]`."""
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 3)).permute(2, 0, 3, 1, 4)
        first = 0
        if self.cp is not None:
            first = self.cp.get_local_rank() * x.shape[1]
            group = self.cp.get_group()
            k, v = (all_gather_tensor_autograd(t.contiguous(), 2, group) for t in (k, v))
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[first : first + x.shape[1]]
        heads = F.scaled_dot_product_attention(q, k, v, mask)
        return self.out(heads.transpose(1, 2).flatten(2)).square().mean()


@on_ranks(4)
def test_split_sequences_train_like_whole_sequences() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    torch.manual_seed(0)
    model = Attention(mesh["cp"])
    whole_model = Attention(None)
    whole_model.load_state_dict(model.state_dict())
    backend = graphshard.backend(compiler="aot_eager")
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for step in range(2):
        data = [torch.randn(2, LENGTH, 6, generator=generator(step, row)) for row in range(2)]
        batch = data[mesh["dp"].get_local_rank()]
        compiled(batch.chunk(2, 1)[mesh["cp"].get_local_rank()]).backward()
        (sum(map(whole_model, data)) / 2).backward()
        for param, expected in zip(model.parameters(), whole_model.parameters(), strict=True):
            assert param.grad is not None and expected.grad is not None
            torch.testing.assert_close(whole(param.grad), expected.grad)
            param.grad = expected.grad = None
