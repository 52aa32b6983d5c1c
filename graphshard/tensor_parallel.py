"""Tensor parallelism for transformers models, as assumed by ``graphshard plan --tp``.

How the ranks along tp divide the output of each stage; the MLP is split like attention:

            embed ─► [norm ─► gather ─► q k v, attention ─► out, scatter] .. ─► head
sequence    split     split   whole     whole               split               whole
features    whole     whole   whole     split (heads)       whole               split (vocabulary)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

Parallelize = Callable[[nn.Module, DeviceMesh], object]  # splits a model over a mesh, in place

_SEQUENCE, _WHOLE = Shard(1), Replicate()  # layouts of activations [batch, length, features]

# Keyed by transformers' style names. The last style is for per-head norms: ``sequence_dim`` is the
# dimension of the heads, which SequenceParallel can split because the norm is over another one.
_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": lambda: RowwiseParallel(output_layouts=_SEQUENCE),
    "replicated_with_grad_allreduce": lambda: SequenceParallel(
        sequence_dim=2, use_local_output=True
    ),
}
# Modules whose inputs are gathered along the sequence; styles match how layers call the modules.
_GATHERS: dict[str, Callable[[], ParallelStyle]] = {
    "self_attn": lambda: PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": _SEQUENCE},
        desired_input_kwarg_layouts={"hidden_states": _WHOLE},
    ),
    "mlp": lambda: PrepareModuleInput(input_layouts=_SEQUENCE, desired_input_layouts=_WHOLE),
}
_LAYER = "layers.*."


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split a causal language model from transformers over ``mesh``, in place.

    The projections of each layer are split by the configuration's ``base_model_tp_plan``, the
    embedding and the head along the vocabulary, and activations between layers along the sequence
    (sequence parallelism: Korthikanti et al., arXiv 2205.05198). Each rank returns the logits of
    its part of the vocabulary, and ``model.loss_function`` is replaced by a cross entropy that does
    not gather them.

    Args:
        model: unsharded model whose attention takes no mask, as with
            ``attn_implementation="flash_attention_2"``.
        mesh: 1D mesh, such as ``init_device_mesh(..)["tp"]``; its size must divide the sequence
            length.

    Raises:
        ValueError: the model has no plan; its plan has an unsupported style, such as that of
            experts, or omits a parameter; or the size of ``mesh`` does not divide the number of
            (key-value) heads, the intermediate size or the vocabulary size.
    """
    config: Any = getattr(model, "config", None)
    styles = getattr(config, "base_model_tp_plan", None)
    name = getattr(config, "model_type", type(model).__name__)
    if not styles:
        raise ValueError(f"{name} has no base_model_tp_plan: {_OWN_PLAN}")
    _check_styles(name, styles)
    lm: Any = model
    _check_sizes(name, lm, mesh.size())
    base = getattr(lm, lm.base_model_prefix)
    embedding, head = lm.get_input_embeddings(), lm.get_output_embeddings()
    plans = [(layer, _layer_plan(name, layer, styles)) for layer in base.layers]
    for layer, plan in plans:
        parallelize_module(layer, mesh, plan)
    for child in base.children():
        if child is not embedding and _own_parameters(child):
            parallelize_module(child, mesh, SequenceParallel())
    parallelize_module(
        embedding, mesh, RowwiseParallel(input_layouts=_WHOLE, output_layouts=_SEQUENCE)
    )
    # Return local logits: AOTAutograd's backward fails if a DTensor output gets no gradient.
    parallelize_module(head, mesh, ColwiseParallel(input_layouts=_SEQUENCE))
    lm.loss_function = functools.partial(_causal_loss, mesh)
    lm.tie_weights()
    base.register_forward_pre_hook(_with_positions, with_kwargs=True)


_OWN_PLAN = "pass a function that calls parallelize_module (--tp-plan FILE.py:FUNCTION)"


def _check_styles(name: str, styles: dict[str, str]) -> None:
    for path, style in styles.items():
        parent = path.removeprefix(_LAYER).rpartition(".")[0]
        if style not in _STYLES:
            supported = f"styles {', '.join(_STYLES)}"
        elif style == "colwise" and parent not in _GATHERS:
            supported = f"parts of {' and '.join(_GATHERS)}"
        else:
            continue
        raise ValueError(
            f"{name}: cannot split {path} by style {style!r}, only {supported}: {_OWN_PLAN}"
        )


def _check_sizes(name: str, lm: Any, size: int) -> None:
    fields = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    numbers = {field: getattr(lm.config, field, None) for field in fields}
    numbers["output_embeddings.out_features"] = lm.get_output_embeddings().out_features
    for field, number in numbers.items():
        if number and number % size:
            raise ValueError(f"tp={size}: must divide {field}={number} of {name}")


def _layer_plan(name: str, layer: nn.Module, styles: dict[str, str]) -> dict[str, ParallelStyle]:
    paths = {path.removeprefix(_LAYER): style for path, style in styles.items()}
    plan = {path: _STYLES[style]() for path, style in paths.items()}
    for path, style in paths.items():
        parent = path.rpartition(".")[0]
        if style == "colwise":
            plan[parent] = _GATHERS[parent]()
    plan |= {path: SequenceParallel() for path, c in layer.named_children() if _own_parameters(c)}
    missing = [p for p, _ in layer.named_parameters() if p.rpartition(".")[0] not in plan]
    if missing:
        raise ValueError(f"the base_model_tp_plan of {name} lacks {missing[0]}: {_OWN_PLAN}")
    return plan


def _own_parameters(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters(recurse=False))


def _with_positions(
    base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    # Without ``position_ids``, models would derive positions from the embeddings, which are only
    # this rank's part of the sequence.
    if kwargs.get("position_ids") is None:
        ids = kwargs.get("input_ids")
        if ids is None:
            raise ValueError(
                f"{type(base).__name__} is split by tensor parallelism and got neither input_ids "
                "nor position_ids: pass position_ids with inputs_embeds"
            )
        kwargs["position_ids"] = torch.arange(ids.shape[1], device=ids.device)[None]
    return args, kwargs


def _causal_loss(
    mesh: DeviceMesh,
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **_: object,
) -> torch.Tensor:
    """Compute ``ForCausalLMLoss`` of transformers from this rank's part of the logits.

    Args:
        logits: ``[batch, length, vocab_size / mesh.size()]``.
        labels: labels in ``[0, vocab_size)``, or ``ignore_index``; not checked.
    """
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    shift_labels, logits = shift_labels.to(logits.device), logits.float()
    shifted = logits - _reduce(mesh, logits.detach().amax(-1, keepdim=True), "max")
    total = _reduce(mesh, shifted.exp().sum(-1))
    # Each label's logit is on one rank; other ranks add 0. Unlike the backward of ``gather``, that
    # of ``where`` fuses with the softmax and takes no memory.
    columns = torch.arange(logits.shape[-1], device=logits.device)
    is_label = columns + mesh.get_local_rank() * len(columns) == shift_labels[..., None]
    losses = total.log() - _reduce(mesh, shifted.where(is_label, 0).sum(-1))
    counts = shift_labels != ignore_index
    number = counts.sum() if num_items_in_batch is None else num_items_in_batch
    if isinstance(number, torch.Tensor):
        number = number.to(logits.device)
    return losses.where(counts, 0).sum() / number


def _reduce(mesh: DeviceMesh, part: torch.Tensor, op: str = "sum") -> torch.Tensor:
    # All ranks compute the same loss, so each part gets the gradient of the result.
    return DTensor.from_local(part, mesh, [Partial(op)], run_check=False).full_tensor()
