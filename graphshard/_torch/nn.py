"""Modules: their parameters and hooks, the calls that replace parameters, containers of tensors.

Read in torch/nn/modules/module.py and rnn.py, torch/distributed/utils.py and
checkpoint/_nested_dict.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.utils import _apply_to_tensors as apply_to_tensors

__all__ = ["apply_to_tensors", "unflatten_state_dict"]

FLAT_WEIGHTS = "_flat_weights"
"""The attribute of ``nn.RNNBase`` that lists its parameters once more."""


COMPILED_PREFIX = "_orig_mod."
"""What ``torch.compile`` puts into the names of a module that it wraps."""


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the registered parameters of this module alone; writable."""
    return module._parameters


def parameters_if_initialised(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the same; empty where ``nn.Module.__init__`` of ``module`` did not run."""
    parameters: dict[str, nn.Parameter | None] = module.__dict__.get("_parameters", {})
    return parameters


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the registered buffers of this module alone; writable."""
    return module._buffers


def replace_parameters(module: nn.Module, change: Callable[[nn.Parameter], torch.Tensor]) -> None:
    """Put other storages into all parameters of ``module``, as ``to_empty`` does."""
    module._apply(lambda t: change(t) if isinstance(t, nn.Parameter) else t)


def has_forward(module: nn.Module) -> bool:
    """Return whether ``module`` can be called: containers such as ``nn.ModuleList`` cannot."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def flat_weights(module: nn.RNNBase) -> list[torch.Tensor | None]:
    """Return the parameters in the order of ``_flat_weights``, read as attributes of ``module``."""
    return [getattr(module, name, None) for name in module._flat_weights_names]


def forward_pre_hooks(module: nn.Module) -> list[object]:
    """Return the hooks that run before the forward of ``module``, in their order."""
    return list(module._forward_pre_hooks.values())


def remove_forward_hooks(module: nn.Module, name: str) -> None:
    """Remove the hooks behind the forward of ``module`` that are functions of this name."""
    hooks = module._forward_hooks
    for key in [k for k, hook in hooks.items() if getattr(hook, "__name__", "") == name]:
        del hooks[key]


def reduced_by(ddp: nn.parallel.DistributedDataParallel) -> list[nn.Parameter]:
    """Return the parameters whose gradients this DDP reduces (torch/nn/parallel/distributed.py)."""
    return getattr(ddp, "_module_parameters", [])  # not yet while it is made


def uncompiled(value: object) -> object:
    """Return the module that ``torch.compile`` wrapped in ``value``, or ``value`` itself.

    ``OptimizedModule._orig_mod`` in torch/_dynamo/eval_frame.py.
    """
    return getattr(value, "_orig_mod", value)


def versions_of(state_dict: Mapping[str, object]) -> dict[str, Any]:
    """Return the versions of modules that a state dict may carry, by module name."""
    return dict(getattr(state_dict, "_metadata", {}))


def set_versions(state_dict: OrderedDict[str, Any], versions: dict[str, Any]) -> None:
    """Have a state dict carry them: modules read files of older versions in other ways."""
    state_dict._metadata = OrderedDict(versions)  # type: ignore[attr-defined]


_EMPTIES = "Module.to_empty.<locals>.<lambda>"
"""The name of what ``to_empty`` applies to every parameter."""


class NoticesReplacement(nn.Module):
    """A module that is told after each call that may have replaced its parameters or storages.

    These calls are ``.to()``, ``to_empty()`` and the like, ``load_state_dict()`` with ``assign``,
    and unpickling or copying.
    """

    def _graphshard_on_replacement(self, *, empty: bool = False) -> None:
        """
        Args:
            empty: nobody has written the new storages yet.
        """
        raise NotImplementedError

    def _graphshard_before_loading(
        self, state_dict: dict[str, Any], prefix: str, assigns: bool
    ) -> None:
        """Change what this module's parameters, ``prefix + name``, are about to be loaded from."""
        raise NotImplementedError

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)
        self._graphshard_on_replacement(empty=getattr(fn, "__qualname__", "") == _EMPTIES)
        return result

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        # Registered last, it sees the names that other hooks, or a method of the class, put there.
        hook = self.register_load_state_dict_pre_hook(_before_loading)
        try:
            super()._load_from_state_dict(*args, **kwargs)
        finally:
            hook.remove()
        self._graphshard_on_replacement()

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self._graphshard_on_replacement()


def _before_loading(
    module: NoticesReplacement, state_dict: Any, prefix: str, metadata: Any, *rest: object
) -> None:
    """Call ``_graphshard_before_loading``: a hook of ``load_state_dict``."""
    assigns = metadata.get("assign_to_params_buffers", False)
    module._graphshard_before_loading(state_dict, prefix, assigns)
