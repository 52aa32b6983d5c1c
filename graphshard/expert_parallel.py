"""Expert parallelism for transformers models, as assumed by ``graphshard plan --ep``.

Experts are split over the mesh axis "ep", then sharded over "efsdp". Each rank has its own data;
ranks along "efsdp" have the same experts:

    tokens ─► router ─► sort by expert ─► all-to-all ─► experts ─► all-to-all ─► weighted sum
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ._torch.distributed import all_to_all, name_for_graphs
from ._torch.dtensor import flattened, local_tensor

AXES = ("efsdp", "ep")
_WEIGHTS = ["gate_up_proj", "down_proj"]
_IMPLEMENTATION = "graphshard_ep"


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return a 1D mesh "dp" over the axes "efsdp" and "ep", for parameters other than experts."""
    return flattened(mesh[AXES], "dp")


def overrides(model: nn.Module, mesh: DeviceMesh) -> dict[str, dict[str, Any]]:
    """Return ``overrides`` that shard, over "efsdp", the parameters that are split over "ep".

    Dim 1 is sharded if the size of "efsdp" does not divide a rank's number of experts, else dim 0.
    """
    efsdp = mesh["efsdp"]
    return {
        fqn: {"mesh": efsdp, "dim": int(local_tensor(param).shape[0] % efsdp.size() > 0)}
        for fqn, param in model.named_parameters()
        if isinstance(param, DTensor)
    }


def parallelize(model: nn.Module, mesh: DeviceMesh, *, balanced: bool = False) -> None:
    """Split the experts of a transformers model over ``mesh``, in place.

    Each rank keeps an equal part of the experts of every layer as DTensors. The number of
    tokens sent from rank to rank depends on the data, so compile with
    ``torch._dynamo.config.capture_scalar_outputs = True``.

    Args:
        model: unsharded model whose experts are stacked in ``gate_up_proj`` and ``down_proj``, such
            as Mixtral or Qwen3-MoE.
        mesh: 1D mesh, such as ``init_device_mesh(..)["ep"]``.
        balanced: whether to assume that every rank sends the same number of tokens to each rank,
            which makes sizes independent of data. For forecasts only: no router guarantees it.

    Raises:
        ValueError: the model has no such experts, they have additional parameters, or their number
            is not divisible by the size of ``mesh``.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    modules: list[Any] = [module for module in model.modules() if hasattr(module, _WEIGHTS[0])]
    _check(model, modules, mesh.size())
    for experts in modules:
        for name in _WEIGHTS:
            weight = getattr(experts, name)
            shard = distribute_tensor(weight.detach(), mesh, [Shard(0)])
            setattr(experts, name, nn.Parameter(shard, weight.requires_grad))
        # Store the name of the group: copying the model would fail to copy the group itself.
        experts.ep_group = name_for_graphs(mesh.get_group())
        experts.ep_size, experts.ep_balanced = mesh.size(), balanced
    ALL_EXPERTS_FUNCTIONS.register(_IMPLEMENTATION, _forward)
    lm: Any = model
    lm.set_experts_implementation(_IMPLEMENTATION)


# For fake tensors, which have no values that sizes could depend on.
parallelize_balanced = functools.partial(parallelize, balanced=True)


def _check(model: nn.Module, modules: list[Any], size: int) -> None:
    known = [name for module in modules for name, _ in module.named_parameters(recurse=False)]
    if not modules or known != _WEIGHTS * len(modules):
        raise ValueError(
            f"ep={size}: cannot split the experts of {type(model).__name__}: each module of "
            f"experts must have just two parameters, the stacked {' and '.join(_WEIGHTS)}, as in "
            "Mixtral and Qwen3-MoE; otherwise, use ep=1"
        )
    for number in (module.num_experts for module in modules):
        if number % size:
            raise ValueError(
                f"ep={size}: must divide the number of experts in each layer, {number}"
            )


class _LocalExperts:
    """A module of experts, reduced to the weights and the number of this rank's experts.

    Other attributes are those of the full module.
    """

    def __init__(self, experts: Any) -> None:
        self.experts = experts
        self.gate_up_proj = experts.gate_up_proj.to_local()
        self.down_proj = experts.down_proj.to_local()
        self.num_experts = self.down_proj.shape[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.experts, name)


def _forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Return, for each token, the weighted sum of the outputs of its experts.

    Args:
        self: module of the experts.
        hidden_states: ``[tokens, features]``.
        top_k_index, top_k_weights: indices and weights of each token's experts, ``[tokens, k]``.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    group, expert = self.ep_group, top_k_index.flatten()
    order = expert.argsort(stable=True)
    counts = expert.new_zeros(self.num_experts).scatter_add(0, expert, torch.ones_like(expert))
    counts = counts.view(self.ep_size, -1)
    received = all_to_all(counts, None, None, group)
    sizes = sent_sizes = None
    if not self.ep_balanced:
        sizes, sent_sizes = _sizes(received), _sizes(counts)
    x = all_to_all(hidden_states[order // top_k_index.shape[1]], sizes, sent_sizes, group)
    own = torch.arange(received.shape[1], device=x.device).repeat(received.shape[0])
    own = own.repeat_interleave(received.flatten(), output_size=x.shape[0])[:, None]
    apply: Any = ALL_EXPERTS_FUNCTIONS["grouped_mm"]
    y = apply(_LocalExperts(self), x, own, torch.ones_like(own, dtype=x.dtype))
    y = all_to_all(y, sent_sizes, sizes, group)[order.argsort()]
    y = y.view(*top_k_index.shape, -1) * top_k_weights[..., None]
    return y.sum(1).to(hidden_states.dtype)


def _sizes(counts: Tensor) -> list[int]:
    """Return token counts per rank, given ``counts`` per expert, ``[ranks, experts of a rank]``."""
    sizes: list[int] = counts.sum(1).tolist()
    return sizes
