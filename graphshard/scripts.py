"""Load a function from a user's script, unpack its model and inputs, and find the model's loss."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from ._torch.nn import uncompiled
from ._torch.tensors import tree_leaves

_T = TypeVar("_T")
Inputs: TypeAlias = Sequence[Any] | Mapping[str, Any]  # positional or keyword arguments of a step


def load_named_function(option: str, name: str) -> Callable[..., object]:
    """Load function ``name``, given as FILE.py:FUNCTION in a command's ``option``.

    Raises:
        ValueError: as ``load_function``, or ``name`` has another form.
    """
    script, _, function = name.rpartition(":")
    if not script:
        raise ValueError(f"{option} {name}: must be FILE.py:FUNCTION")
    return load_function(script, function)


def load_function(script: str, function: str) -> Callable[..., object]:
    """Run a script and return one of its functions or classes; the script's errors propagate.

    Raises:
        ValueError: ``script`` is not an existing Python file, or does not define ``function``.
    """
    path = Path(script).resolve()
    if not (path.is_file() and path.suffix == ".py"):
        raise ValueError(f"{script}: must be an existing Python file")
    module = _run(path, path.stat().st_mtime_ns)
    value = getattr(module, function, None)
    if not callable(value):
        names = [
            name
            for name, value in vars(module).items()
            if (inspect.isfunction(value) or inspect.isclass(value))
            and value.__module__ == path.stem
        ]
        choices = f"choose one of {', '.join(names)}" if names else "it defines none"
        raise ValueError(f"{script} has no function {function!r}: {choices}")
    return value


@functools.cache  # a script that several options name runs once: its classes are then the same
def _run(path: Path, changed_ns: int) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    sys.path.insert(0, str(path.parent))  # as `python script.py` does
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def unpack(function: str, returned: object) -> tuple[nn.Module, Inputs, dict[str, Any]]:
    """Check and unpack ``(model, inputs)`` or ``(model, inputs, options)`` from ``function``.

    Raises:
        ValueError: ``returned`` is not such a tuple, or the model is compiled.
    """
    if not (isinstance(returned, tuple) and len(returned) in (2, 3)):
        raise ValueError(
            f"{function} returned {_kind(returned)}: must be (model, inputs) or (model, "
            "inputs, options of graphshard.backend)"
        )
    model, inputs, *rest = returned
    options = rest[0] if rest else {}
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"{function} returned {_kind(model)} as the model: must be a torch.nn.Module"
        )
    if uncompiled(model) is not model:
        raise ValueError(f"{function} returned a compiled model: remove its torch.compile")
    if not isinstance(inputs, Sequence | Mapping) or isinstance(inputs, str):
        raise ValueError(
            f"{function} returned {_kind(inputs)} as the inputs: must be a tuple, as in "
            "(model, (tokens,)), or a dictionary of keyword arguments"
        )
    if not isinstance(options, Mapping):
        raise ValueError(
            f"{function} returned {_kind(options)} as the options: must be a dictionary of "
            "arguments of graphshard.backend"
        )
    return model, inputs, dict(options)


def call_model(model: Callable[..., _T], inputs: Inputs) -> _T:
    """Call a model, compiled or not, with the inputs of a step."""
    return model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)


def loss_of(outputs: object) -> torch.Tensor:
    """Return the loss: ``loss`` of the outputs, or else their first tensor; summed unless a scalar.

    Raises:
        ValueError: ``outputs`` has no tensor, or the loss depends on no trained parameter.
    """
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if loss is None:
        tensors = (leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor))
        loss = next(tensors, None)
    if loss is None:
        raise ValueError(
            f"the model's output, of type {_kind(outputs)}, has no tensor: return the loss"
        )
    if not loss.requires_grad:
        raise ValueError(
            "the loss depends on no parameter that requires a gradient, so nothing would be "
            "trained: set requires_grad=True on the parameters to train, and do not detach the "
            "loss or compute it under torch.no_grad()"
        )
    return loss if loss.dim() == 0 else loss.float().sum()


def _kind(value: object) -> str:
    # Call a fake tensor "Tensor", too.
    return "Tensor" if isinstance(value, torch.Tensor) else type(value).__name__
