"""Expert parallelism: experts are split over one axis of the data ranks, sharded over the other.

Each of the four ranks has its own batches. Along `ep`, each rank has half of the experts, and
tokens are sent to their expert's rank. Along `efsdp`, ranks have the same experts.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import graphshard
from graphshard.integrations.common import save_sharded
from tests import ranks
from tests.multirank.test_call_log import assert_same, message
from tests.multirank.test_errors import assert_refused
from tests.numerics.compare import assert_close, draw, generator, sgd, whole
from tests.ranks import on_ranks

NUM_EXPERTS, DIM, HIDDEN = 4, 6, 8


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(NUM_EXPERTS, DIM, HIDDEN) / 2)
        self.w2 = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN, DIM) / 2)

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        """Apply each token's `expert` to it; `x` and the result are `[tokens, DIM]`."""
        w1, w2 = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w2))
        y = torch.zeros_like(x)
        for i in range(w1.shape[0]):
            y = y + (expert == i).to(x.dtype)[:, None] * ((x @ w1[i]).relu() @ w2[i])
        return y


class MoE(nn.Module):
    """A mixture of experts that sends each token to the rank of its expert.

    Attributes:
        ep: group over which experts are split; None if this rank has all.
        breaks: whether there is a graph break before the experts.
    """

    ep: Any = None
    breaks = False

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.router = nn.Linear(DIM, DIM), nn.Linear(DIM, NUM_EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        weight, expert = self.router(x).softmax(-1).max(-1)
        if self.breaks:
            torch._dynamo.graph_break()
        order = expert.argsort(stable=True)
        y = self._sent(x[order], F.one_hot(expert, NUM_EXPERTS).sum(0), expert[order])
        y = y[order.argsort()]
        return (x + weight[:, None] * y).square().mean()

    def _sent(self, x: Tensor, counts: Tensor, expert: Tensor) -> Tensor:
        """Return the outputs for tokens `x`, which are sorted by expert."""
        if self.ep is None:
            return self.experts(x, expert)
        num_ranks = dist.get_world_size(self.ep)
        received = all_to_all_single(counts, None, None, self.ep).view(num_ranks, -1)
        sent_sizes = counts.view(num_ranks, -1).sum(1).tolist()
        sizes = received.sum(1).tolist()
        for size in (*sizes, *sent_sizes):
            torch._check(size >= 0)
        numbers = torch.arange(received.shape[1]).repeat(num_ranks)
        own = numbers.repeat_interleave(received.flatten(), output_size=sum(sizes))
        y = all_to_all_single(x, sizes, sent_sizes, self.ep)
        return all_to_all_single(self.experts(y, own), sent_sizes, sizes, self.ep)

    @staticmethod
    def batch(rng: torch.Generator) -> Tensor:
        return torch.randn(9, DIM, generator=rng)

    def parallelize(self, ep: DeviceMesh, *, as_dtensors: bool = True) -> MoE:
        """Keep this rank's experts, as DTensors or as plain tensors."""
        self.ep = ep.get_group()
        for name, param in list(self.experts.named_parameters()):
            part: Tensor = distribute_tensor(param.detach(), ep, [Shard(0)])
            setattr(self.experts, name, nn.Parameter(part if as_dtensors else part.to_local()))
        return self


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))


def _data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    return mesh["efsdp", "ep"]._flatten("dp")


def _dims(w1: int, w2: int, mesh: DeviceMesh) -> dict[str, dict[str, Any]]:
    """Return `overrides` with the experts' mesh and the dims on which to shard their weights."""
    overrides = {"experts": {"mesh": mesh["efsdp"]}}
    return {**overrides, "experts.w1": {"dim": w1}, "experts.w2": {"dim": w2}}


def _train_like(plain: MoE, model: MoE, call: Any, eager: Any = None, steps: int = 2) -> None:
    """Train a model next to an unsharded one and, if given, FSDP2's; compare all values."""
    rank, ep = dist.get_rank(), model.ep
    for step in range(steps):
        batches = draw(MoE.batch, step)
        losses = torch.stack([plain(batch) for batch in batches])
        losses.mean().backward()
        loss = call(batches[rank])
        loss.backward()
        assert_close("loss", loss, losses[rank])
        if eager is not None:
            eager(batches[rank]).backward()
            for param in eager.experts.parameters():  # FSDP2 divides by the size of efsdp only
                param.grad.div_(ep.size())
        for name, param in plain.named_parameters():
            ours = model.get_parameter(name)
            assert_close(f"gradient of {name}", _all_experts(ours.grad, ours, ep), param.grad)
            if eager is not None:
                other = eager.get_parameter(name)
                assert ours.placements == other.placements, name
                assert ours.device_mesh == other.device_mesh, name
                torch.testing.assert_close(ours.grad.to_local(), other.grad.to_local())
        for trained in filter(None, (plain, model, eager)):
            sgd(trained).step()
            trained.zero_grad()
        for name, param in plain.named_parameters():
            ours = model.get_parameter(name)
            assert_close(name, _all_experts(ours, ours, ep), param)


def _all_experts(value: Any, param: Any, ep: Any) -> Tensor:
    """Return a full tensor; for plain experts, concatenate those of all ranks along `ep`."""
    full = whole(value)
    if param.device_mesh.ndim == 2 or full.ndim < 3:
        return full
    parts = [torch.empty_like(full) for _ in range(ep.size())]
    dist.all_gather(parts, full.contiguous(), group=ep)
    return torch.cat(parts)


def _compile(model: MoE, mesh: DeviceMesh, dims: tuple[int, int] = (0, 0), **options: Any) -> Any:
    overrides = _dims(*dims, mesh)
    options = {"compiler": "aot_eager", "overrides": overrides, **options}
    backend = graphshard.backend(_data_mesh(mesh), **options)
    return torch.compile(model, backend=backend, fullgraph=not model.breaks)


def _twins(mesh: DeviceMesh, as_dtensors: bool = True) -> tuple[MoE, MoE]:
    plain = MoE()
    return plain, copy.deepcopy(plain).parallelize(mesh["ep"], as_dtensors=as_dtensors)


@pytest.mark.parametrize(("dims", "breaks"), [((0, 0), True), ((2, 1), False)])
@on_ranks(4)
def test_training_matches_fsdp2(dims: tuple[int, int], breaks: bool) -> None:
    mesh = _mesh()
    plain, model = _twins(mesh)
    eager = copy.deepcopy(plain).parallelize(mesh["ep"])
    model.breaks = eager.breaks = breaks
    places = {eager.experts.w1: Shard(dims[0]), eager.experts.w2: Shard(dims[1])}
    dp = _data_mesh(mesh)
    fully_shard(eager.experts, mesh=mesh["efsdp"], shard_placement_fn=places.__getitem__)
    fully_shard(eager, mesh=dp)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        _train_like(plain, model, _compile(model, mesh, dims), eager)


@on_ranks(4)
def test_plain_experts_match_unsharded_model() -> None:
    mesh = _mesh()
    plain, model = _twins(mesh, as_dtensors=False)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        options = {"compiler": "inductor", "reshard_after_forward": False}
        compiled = _compile(model, mesh, (1, 0), **options)
        _train_like(plain, model, compiled)
        # The norm covers all experts, although no mesh spans them.
        batches = draw(MoE.batch, 7)
        compiled(batches[dist.get_rank()]).backward()
        torch.stack([plain(batch) for batch in batches]).mean().backward()
        norm = graphshard.clip_grad_norm_(model.parameters(), 1e-2)
        assert_close("norm", norm, nn.utils.clip_grad_norm_(plain.parameters(), 1e-2))
        for name, param in plain.named_parameters():
            ours = model.get_parameter(name)
            assert_close(name, _all_experts(ours.grad, ours, model.ep), param.grad)
        graphshard.set_gradient_divide_factor(model, 1.0)
        for trained in (model, plain):
            trained.zero_grad()
        compiled(batches[dist.get_rank()]).backward()
        torch.stack([plain(batch) for batch in batches]).sum().backward()
        for name, param in plain.named_parameters():
            ours = model.get_parameter(name)
            assert_close(name, _all_experts(ours.grad, ours, model.ep), param.grad)
    for save in (graphshard.full_state_dict, lambda model: save_sharded(Path(), model, [])):
        with pytest.raises(ValueError, match=r"'experts.w1' is on .*efsdp.* only"):
            save(model)


@on_ranks(4)
def test_expert_states_are_saved_and_loaded(tmp_path: Path) -> None:
    mesh = _mesh()
    plain, model = _twins(mesh)
    options = {"overrides": _dims(1, 0, mesh), "mesh": _data_mesh(mesh)}
    graphshard.shard(model, **options)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(MoE.batch(generator(dist.get_rank()))).backward()
    graphshard.clip_grad_norm_(model.parameters(), 1.0)
    optim.step()
    full, full_optim = graphshard.full_state_dict(model, optim)
    if dist.get_rank() == 0:
        plain.load_state_dict(full)
    other = graphshard.shard(MoE().parallelize(mesh["ep"]), **options)
    other_optim = torch.optim.AdamW(other.parameters(), lr=0.1)
    graphshard.load_full_state_dict(other, full, other_optim, full_optim)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path)
    loaded = graphshard.shard(MoE().parallelize(mesh["ep"]), **options)
    dcp.load(loaded.state_dict(), checkpoint_id=tmp_path)
    whole_again = MoE()
    dcp.load(whole_again.state_dict(), checkpoint_id=tmp_path)
    for name, param in model.named_parameters():
        for twin in (other, loaded, whole_again):
            assert torch.equal(whole(twin.get_parameter(name)), whole(param)), name
        if dist.get_rank() == 0:
            assert torch.equal(plain.get_parameter(name), whole_again.get_parameter(name)), name
        exp_avg = other_optim.state[other.get_parameter(name)]["exp_avg"]
        assert exp_avg.placements == param.placements
        assert torch.equal(whole(exp_avg), whole(optim.state[param]["exp_avg"])), name


# Errors, raised before anything is changed.


@pytest.mark.parametrize(
    ("own", "over", "match"),
    [
        ("none", "dp", r"'experts.w1' is a DTensor .*overlaps.*experts need their own mesh"),
        ("other", "dp", r"'experts.w1' has .* in overrides, .*slices of one mesh"),
        ("ep", "dp", r"'experts.w1' is a DTensor .*the mesh to shard over"),
        ("efsdp", "none", r"'experts.w1' has .* in overrides, .*slices of one mesh"),
        ("dp", "efsdp", r"'experts.w1' is on .*dp.*, but the model is trained only by"),
        ("efsdp", "efsdp", r"'experts.w1' is on .*ep.*, but the model is trained only by"),
    ],
)
@on_ranks(4)
def test_wrong_meshes_are_refused(own: str, over: str, match: str) -> None:
    mesh = _mesh()
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["a"]
    meshes = {"dp": _data_mesh(mesh), "none": None, "other": other}
    meshes |= {name: mesh[name] for name in ("efsdp", "ep")}
    overrides = {"experts": {"mesh": meshes[own]}}

    def shard(model: nn.Module) -> None:
        graphshard.shard(model, meshes[over], overrides=overrides)

    assert_refused(MoE().parallelize(mesh["ep"]), shard, match)


def test_override_without_mesh_is_refused() -> None:
    with pytest.raises(ValueError, match=r"overrides\['experts'\]: mesh='ep': must be a"):
        graphshard.backend(overrides={"experts": {"mesh": "ep"}})


# Ranks that differ along ep, an axis that the experts' mesh does not have.


def _shard_frozen(frozen: list[int]) -> str:
    mesh = _mesh()
    model = MoE().parallelize(mesh["ep"])
    if dist.get_rank() in frozen:
        model.experts.w1.requires_grad_(False)
    options = {"overrides": _dims(0, 0, mesh), "mesh": _data_mesh(mesh)}
    return message(lambda: graphshard.shard(model, **options))


@pytest.mark.parametrize("frozen", [[3], [1, 3]])
def test_experts_frozen_on_some_ranks_raise_on_all(frozen: list[int]) -> None:
    messages = ranks.run_fresh(4, _shard_frozen, frozen)
    assert_same(messages, "'experts.w1' differs between ranks", f"on rank {frozen[0]}")
