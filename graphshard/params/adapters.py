"""Gather the adapters of a sharded peft model without its base model.

peft itself selects what to save: it gets a state dict of meta tensors, and only the tensors that it
selects are gathered. It is imported only for a ``PeftModel``, so it need not be installed.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn

from .._torch.nn import uncompiled
from .agree import broadcast_from_rank, raise_on_all_ranks
from .full_state_dict import StateDict, full_state_dict, is_first_rank, mesh_groups_of
from .mesh import agree_on_gathering

if TYPE_CHECKING:
    from peft import PeftModel


def is_peft_model(model: object) -> TypeGuard[PeftModel]:
    """Return whether ``model`` is a ``PeftModel``."""
    kind = getattr(sys.modules.get("peft"), "PeftModel", None)
    return kind is not None and isinstance(model, kind)


def adapter_state_dict(model: nn.Module) -> StateDict:
    """Gather on the mesh's first rank the tensors that ``model.save_pretrained`` saves.

    All ranks have to call it. The base model is not gathered, except for parts that peft saves as
    well (``modules_to_save``, resized embeddings).

    Returns:
        Full tensors on the first rank's host, by their names in ``model.state_dict()``; empty on
        all other ranks.

    Raises:
        ValueError: ``model`` is not a ``PeftModel``, or it uses prompt learning, for which peft
            computes what it saves.
        Exception: peft's own error, on the first rank; the others raise a ``ValueError`` that
            quotes it.
    """
    root: Any = uncompiled(model)
    if not is_peft_model(root):
        raise ValueError(f"model is a {type(root).__name__}: give the PeftModel")
    refuse_prompt_learning(root)
    groups = mesh_groups_of(root)
    if groups is None:
        return full_state_dict(root, names=_names(root))
    remedy = "state = adapter_state_dict(model) outside of any `if rank == 0:`"
    agree_on_gathering(groups, "adapter_state_dict", type(root).__name__, remedy)
    names, error = [], None
    # Only the first rank asks peft, which may read files of the base model that others lack.
    if is_first_rank(groups):
        try:
            names = _names(root)
        except Exception as caught:
            error = caught
    raise_on_all_ranks(error, groups)
    return full_state_dict(root, names=broadcast_from_rank(names, 0, groups))


def refuse_prompt_learning(model: object) -> None:
    """Check that ``model`` has no prompt-learning adapters, if it is a ``PeftModel``.

    Raises:
        ValueError: it has one. peft would compute the saved prompts by a forward on one rank, which
            has only its shards.
    """
    configs = model.peft_config if is_peft_model(model) else {}
    for name, config in configs.items():
        if config.is_prompt_learning:
            raise ValueError(
                f"the adapter {name!r} is of {config.peft_type}, which peft saves by a forward on "
                "one rank, where a sharded model has no values: use LoRA or the like"
            )


def _names(model: PeftModel) -> list[str]:
    """Return the names of the tensors that peft saves for all adapters."""
    from peft import get_peft_model_state_dict

    state = {
        name: torch.empty(value.shape, dtype=value.dtype, device="meta")
        if isinstance(value, torch.Tensor)
        else value
        for name, value in model.state_dict().items()
    }
    try:
        chosen = [
            get_peft_model_state_dict(model, state, adapter).values()
            for adapter in model.peft_config
        ]
    except (RuntimeError, NotImplementedError):  # peft reads values, e.g. AdaLoRA's ranks
        return list(state)
    wanted = {id(value) for values in chosen for value in values}
    # Always keep trained parameters: peft may save new tensors that it computes from them.
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    return [name for name, value in state.items() if id(value) in wanted or name in trained]
