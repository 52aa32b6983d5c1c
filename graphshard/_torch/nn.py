"""Modules and optimizers: parameters, hooks, replacement of parameters, loading.

Relies on torch/nn/modules/module.py and rnn.py, torch/optim/optimizer.py and _muon.py,
torch/amp/grad_scaler.py, torch/distributed/utils.py and
torch/distributed/checkpoint/_nested_dict.py.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _apply_to_tensors as apply_to_tensors
from torch.optim import Optimizer
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from .dtensor import attributes_of
from .patches import patch

__all__ = ["apply_to_tensors", "unflatten_state_dict"]

FLAT_WEIGHTS = "_flat_weights"  # attribute of ``nn.RNNBase``: a second list of its parameters
COMPILED_PREFIX = "_orig_mod."  # prefix of parameter names in a module from ``torch.compile``
# Prefix of parameter names, but not of state dict keys, in a module of ``checkpoint_wrapper``
# (torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py).
CHECKPOINT_PREFIX = "_checkpoint_wrapped_module."


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Create normal tensors, which can be trained, even in inference mode; keep the grad mode."""
    with_grad = torch.is_grad_enabled()
    # Leaving inference mode turns gradients on.
    with torch.inference_mode(False), torch.set_grad_enabled(with_grad):
        yield


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the live dictionary of the parameters registered on ``module`` itself."""
    return module._parameters


def parameters_if_initialized(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return ``parameters_of(module)``, or ``{}`` if ``nn.Module.__init__`` has not run."""
    return module.__dict__.get("_parameters", {})


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the live dictionary of the buffers registered on ``module`` itself."""
    return module._buffers


def replace_parameters(module: nn.Module, change: Callable[[nn.Parameter], torch.Tensor]) -> None:
    """Replace each parameter ``p`` of ``module`` and its submodules with ``change(p)``, in place.

    Uses ``nn.Module._apply``, as ``to_empty`` does.
    """
    module._apply(lambda t: change(t) if isinstance(t, nn.Parameter) else t)


def move_plain_tensors(module: nn.Module, device: torch.device) -> None:
    """Move the parameters and buffers of ``module`` and its submodules, except DTensors."""
    module._apply(lambda tensor: tensor if isinstance(tensor, DTensor) else tensor.to(device))


def has_forward(module: nn.Module) -> bool:
    """Return whether ``module`` can be called; containers such as ``nn.ModuleList`` cannot."""
    # Not ``type(module).forward``, which raises for a traced TorchScript module.
    forward = inspect.getattr_static(type(module), "forward")
    return "forward" in vars(module) or forward is not nn.Module.forward


def flat_weight_names(module: nn.RNNBase) -> list[str]:
    """Return the names of the attributes that ``_flat_weights`` holds, in the same order."""
    return list(module._flat_weights_names)


def forward_pre_hooks(module: nn.Module) -> list[object]:
    return list(module._forward_pre_hooks.values())


def remove_forward_hooks(module: nn.Module, name: str) -> None:
    """Remove the forward hooks of ``module`` that are functions named ``name``."""
    hooks = module._forward_hooks
    for key in [k for k, hook in hooks.items() if getattr(hook, "__name__", "") == name]:
        del hooks[key]


def ddp_parameters(ddp: nn.parallel.DistributedDataParallel) -> list[nn.Parameter]:
    """Return the parameters whose gradients this DDP reduces (torch/nn/parallel/distributed.py)."""
    return getattr(ddp, "_module_parameters", [])  # missing during its __init__


def uncompiled(value: object) -> object:
    """Return the module that ``torch.compile`` wrapped in ``value``, or ``value`` itself."""
    return getattr(value, "_orig_mod", value)  # see torch/_dynamo/eval_frame.py


def versions_of(state_dict: Mapping[str, object]) -> dict[str, Any]:
    """Return the module versions that a state dict carries, if any, keyed by module name."""
    return dict(getattr(state_dict, "_metadata", {}))


def set_versions(state_dict: OrderedDict[str, Any], versions: dict[str, Any]) -> None:
    """Store module versions in a state dict; modules use them to load older formats."""
    state_dict._metadata = OrderedDict(versions)  # type: ignore[attr-defined]


_EMPTIES = "Module.to_empty.<locals>.<lambda>"  # name of the function that ``to_empty`` applies


class NoticesReplacement(nn.Module):
    """A module that is notified after calls that may have replaced parameters or storages.

    Covers ``load_state_dict``, ``.to()``, ``to_empty()`` and the like, unpickling and copying.
    """

    def _graphshard_on_replacement(self, *, empty: bool = False) -> None:
        """Handle parameters or storages that may be new; ``empty`` if they are uninitialized."""
        raise NotImplementedError

    def _graphshard_before_loading(
        self, state_dict: dict[str, Any], prefix: str, assigns: bool
    ) -> None:
        """Adapt this module's entries of a state dict before they are copied or assigned."""
        raise NotImplementedError

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # Torch swaps each DTensor with a new one, which swaps the attributes that users set, too.
        kept = [(p, attributes_of(p)) for p in parameters_of(self).values() if p is not None]
        # In inference mode, even ``.to()`` without a change would make parameters untrainable.
        with outside_inference_mode():
            result = super()._apply(fn, recurse)
        for param, attributes in kept:
            vars(param).update(attributes | vars(param))
        self._graphshard_on_replacement(empty=getattr(fn, "__qualname__", "") == _EMPTIES)
        return result

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        with outside_inference_mode():  # in which DTensors cannot be detached
            super()._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        # Registered last, so it sees entries added by other hooks or by an overriding method.
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
    assigns = metadata.get("assign_to_params_buffers", False)
    module._graphshard_before_loading(state_dict, prefix, assigns)


@functools.cache  # registering ``act`` again has no effect
def before_loading_optimizers(act: Callable[[Optimizer, dict[str, Any]], dict[str, Any]]) -> None:
    """Make every optimizer load ``act(optimizer, state_dict)`` instead of a state dict."""

    def wrap(load_state_dict: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(load_state_dict)
        def load(self: Optimizer, state_dict: dict[str, Any]) -> None:
            load_state_dict(self, act(self, state_dict))

        return load

    patch("torch.optim.optimizer.Optimizer.load_state_dict", wrap)


@functools.cache  # registering ``act`` again has no effect
def after_unscaling(act: Callable[[Optimizer, list[torch.Tensor]], None]) -> None:
    """Make every ``GradScaler`` call ``act(optimizer, found_infs)`` when it has checked gradients.

    ``found_infs`` are scalars, 1.0 if any gradient on their device is not finite and 0.0 otherwise;
    the scaler reads them afterwards.
    """

    def wrap(unscale: Callable[..., dict[torch.device, torch.Tensor]]) -> Callable[..., Any]:
        @functools.wraps(unscale)
        def unscale_grads(
            self: Any, optimizer: Optimizer, inv_scale: Any, found_inf: torch.Tensor, *args: Any
        ) -> dict[torch.device, torch.Tensor]:
            by_device = unscale(self, optimizer, inv_scale, found_inf, *args)
            act(optimizer, [found_inf, *by_device.values()])
            return by_device

        return unscale_grads

    patch("torch.amp.grad_scaler.GradScaler._unscale_grads_", wrap)


@contextmanager
def unnoticed_steps(optimizer: Optimizer) -> Iterator[None]:
    """Call no step hooks; afterwards, restore the attributes of ``optimizer``, not their items."""
    own: dict[str, Any] = {"_optimizer_step_pre_hooks": {}, "_optimizer_step_post_hooks": {}}
    shared: dict[str, Any] = {"_global_optimizer_pre_hooks": {}, "_global_optimizer_post_hooks": {}}
    # ``mock.patch.dict`` restores every attribute.
    with mock.patch.dict(vars(optimizer), own), mock.patch.multiple(Optimizer.__module__, **shared):
        yield


def orthogonalized(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Orthogonalize a matrix approximately, in bfloat16, with Newton-Schulz steps.

    Raises:
        ValueError: ``matrix`` is not 2D, there are not 3 coefficients, or ``steps`` exceeds 99.
    """
    # Clone, because torch's function divides a bfloat16 argument in place.
    return _zeropower_via_newtonschulz(matrix.clone(), coefficients, steps, eps)


def adjusted_lr(lr: Any, adjust_lr_fn: str | None, shape: torch.Size) -> Any:
    return _adjust_lr(lr, adjust_lr_fn, shape)
