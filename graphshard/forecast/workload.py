"""Workloads: a model that can be rebuilt, with any number of layers, and its inputs."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .._torch.tensors import tree_leaves
from ..scripts import load_function, unpack
from .configs import config_workload, find_config, is_config
from .public_models import PUBLIC_MODELS
from .trace import Inputs


class BatchShape(NamedTuple):
    """The size of a microbatch on one rank.

    Attributes:
        size: number of samples.
        length: number of tokens in a sample; None: the model's own.
    """

    size: int
    length: int | None = None

    @classmethod
    def parse(cls, text: str) -> BatchShape:
        """Parse "1x8192" (samples x tokens) or "64" (samples).

        Raises:
            ValueError: ``text`` is neither.
        """
        parts = text.lower().split("x")
        if len(parts) > 2 or not all(part.isdigit() and int(part) for part in parts):
            raise ValueError(f'batch={text!r}: write samples x tokens, as in "1x8192", or samples')
        return cls(*map(int, parts))


@dataclass(frozen=True)
class Workload:
    """A model and a microbatch on one rank.

    Attributes:
        make: function that returns the model and its inputs, with the given number of layers; None:
            all layers.
        tokens: number of tokens, or samples, in the microbatch.
        unit: unit of ``tokens``: "tokens" or "samples".
        num_layers: number of layers of the model; None: ``make`` cannot change it.
        period: number of layers after which they repeat.
        notes: assumptions.
    """

    name: str
    make: Callable[[int | None], tuple[nn.Module, Inputs]]
    tokens: int
    unit: str = "tokens"
    num_layers: int | None = None
    period: int = 1
    notes: tuple[str, ...] = ()


MakeWorkload = Callable[[int], Workload]
"""Function from the number of samples in a microbatch to its workload."""


def find_workload(model: str, batch: BatchShape) -> Workload:
    """Return the workload that ``model`` names; see ``python -m graphshard plan --help``.

    Raises:
        ValueError: there is no such model, or it cannot be built.
    """
    script, colon, function = model.rpartition(":")
    if colon and script.endswith(".py"):
        return _script_workload(script, function)
    if is_config(model):
        return Workload(*config_workload(find_config(model), model, *batch))
    if Path(model).exists():
        raise ValueError(f"{model}: must be a folder with a config.json, or FILE.py:FUNCTION")
    raise ValueError(
        f"model {model!r} is not known: give FILE.py:FUNCTION, the folder of a transformers "
        f"config, FAMILY:key=value,.. or one of {', '.join(PUBLIC_MODELS)}"
    )


def _script_workload(script: str, function: str) -> Workload:
    make = load_function(script, function)

    def made(num_layers: int | None) -> tuple[nn.Module, Inputs]:
        model, inputs, _ = unpack(function, make())
        return model, inputs

    with torch.device("meta"):
        tokens, unit = count_tokens(made(None)[1])
    return Workload(f"{script}:{function}", made, tokens, unit)


def module_workload(model: nn.Module, inputs: Inputs, name: str | None = None) -> Workload:
    """Return the workload of a module, which is not modified."""
    tokens, unit = count_tokens(inputs)

    def make(num_layers: int | None) -> tuple[nn.Module, Inputs]:
        return model, inputs

    return Workload(name or type(model).__name__, make, tokens, unit)


def count_tokens(inputs: Inputs) -> tuple[int, str]:
    """Return what one microbatch trains on: a number, and its unit, "tokens" or "samples".

    Raises:
        ValueError: no input is a tensor with a batch dimension.
    """
    leaves = tree_leaves(dict(inputs) if isinstance(inputs, Mapping) else inputs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if not tensors:
        raise ValueError("inputs have no tensor with a batch: give those of a step on one rank")
    first = tensors[0]
    if first.is_floating_point() or first.dim() < 2:
        return first.shape[0], "samples"
    return first.numel(), "tokens"


def num_recomputed(num_layers: int, part: float) -> int:
    """Return how many layers the fraction ``part`` is; the first ones are recomputed."""
    return round(num_layers * part)


def layer_lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    """Return the outermost lists of layers of one type, by name.

    Raises:
        ValueError: there is none.
    """
    found: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) < 2:
            continue
        is_inside = any(name.startswith(f"{outer}.") for outer in found)
        if not is_inside and len({*map(type, module)}) == 1:
            found[name] = module
    if not found:
        raise ValueError("recompute: the model has no nn.ModuleList of layers that are alike")
    return found


def recompute_layers(model: nn.Module, part: float = 1) -> None:
    """Make backward recompute the first layers of each list from their inputs, in place.

    Args:
        part: fraction of the layers, from 0 to 1.

    Raises:
        ValueError: the model has no list of layers.
    """
    if not part:
        return
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if part == 1 and callable(enable):
        enable({"use_reentrant": False})
        return
    for layers in layer_lists(model).values():
        for layer in layers[: num_recomputed(len(layers), part)]:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


def recomputed_layers(model: nn.Module, part: float) -> tuple[str, ...]:
    """Return the layers that ``recompute_layers`` selects, as Python code: "model.layers[:3]".

    Raises:
        ValueError: the model has no list of layers.
    """
    return tuple(
        re.sub(r"\.(\d+)\b", r"[\1]", f"model.{name}[:{num_recomputed(len(layers), part)}]")
        for name, layers in layer_lists(model).items()
    )
