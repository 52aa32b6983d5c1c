"""Workloads to forecast: a model, from a script, module or configuration, and a microbatch."""

from __future__ import annotations

import contextlib
import copy
import difflib
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import sympy
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from .._torch.tensors import tree_leaves
from ..expert_parallel import parallelize_balanced
from ..scripts import Inputs, load_named_function, unpack
from ..tensor_parallel import Parallelize, parallelize
from .public_models import PUBLIC_MODELS, config_folder, is_hub_name


class BatchShape(NamedTuple):
    """Number of samples, and of tokens in each sample (default: the model's length)."""

    size: int
    length: int | None = None

    @classmethod
    def parse(cls, text: str) -> BatchShape:
        parts = text.lower().split("x")
        if len(parts) > 2 or not all(part.isdigit() and int(part) for part in parts):
            raise ValueError(
                f"batch={text!r}: must be positive integers, samples x tokens as in "
                '"1x8192", or samples as in "64"'
            )
        return cls(*map(int, parts))

    def __str__(self) -> str:
        # Parsed by ``parse``.
        return "x".join(str(number) for number in self if number is not None)


@dataclass(frozen=True)
class Workload:
    """A model and a microbatch on one rank."""

    name: str
    make: Callable[[int | None], tuple[nn.Module, Inputs]]  # takes the number of layers (None: all)
    tokens: int  # number of tokens or samples in the microbatch
    unit: str = "tokens"  # unit of ``tokens``: "tokens" or "samples"
    num_layers: int | None = None  # None: ``make`` cannot change it
    period: int = 1  # number of layers in the repeating pattern; its first copy may be irregular
    notes: tuple[str, ...] = ()  # assumptions of a forecast
    parallelize: Parallelize | None = None  # applies tensor parallelism
    split_experts: Parallelize = parallelize_balanced  # applies expert parallelism
    symbols: Mapping[int, sympy.Symbol] = field(default_factory=dict)  # see ``trace``


MakeWorkload = Callable[[int], Workload]  # takes the number of samples in a microbatch


def find_workload(model: str, batch: BatchShape) -> Workload:
    """Return the workload that ``model`` names; see ``python -m graphshard plan --help``.

    ``batch`` is ignored if ``model`` is FILE.py:FUNCTION.

    Raises:
        ValueError: there is no such model, or it cannot be built.
    """
    if is_function(model):
        return _script_workload(model)
    return config_workload(find_config(model), model, batch)


def _unknown(model: str) -> str:
    """Return the error message for a model that is neither a function nor a configuration."""
    if Path(model).exists():
        return f"{model}: must be a folder with a config.json, or FILE.py:FUNCTION"
    name = model.lower().rpartition("/")[2]  # without the owner of a name on the Hub
    close = difflib.get_close_matches(name, PUBLIC_MODELS, n=1)
    hint = f"did you mean {close[0]}? Otherwise " if close else ""
    if is_hub_name(model):
        hint += f"download it from the Hub (hf download {model} config.json), or "
    return (
        f"unknown model {model!r}: {hint}pass FILE.py:FUNCTION, the folder of a transformers "
        f"config, FAMILY:key=value,.. (FAMILY is a model_type of transformers) or one of "
        f"{', '.join(PUBLIC_MODELS)}"
    )


def _script_workload(name: str) -> Workload:
    call = load_named_function("MODEL", name)

    def make(num_layers: int | None) -> tuple[nn.Module, Inputs]:
        model, inputs, _ = unpack(name, call())
        return model, inputs

    with torch.device("meta"):
        _, inputs, options = unpack(name, call())
    for key in options:
        if not isinstance(key, str):
            raise ValueError(
                f"{name} returned options with the key {key!r}: keys must be names of arguments of "
                "graphshard.backend"
            )
    note = (
        f"options that {name} returns are ignored ({', '.join(options)}): use the command's "
        "options, such as --dtype and --strategy"
    )
    return Workload(name, make, *count_tokens(inputs), notes=(note,) if options else ())


def module_workload(
    model: nn.Module, inputs: Inputs, parallelize: Parallelize | None = None
) -> Workload:
    """Return the workload of a module, which is not modified."""
    return Workload(
        type(model).__name__,
        lambda num_layers: (model, inputs),
        *count_tokens(inputs),
        parallelize=parallelize,
        split_experts=parallelize or parallelize_balanced,
    )


def count_tokens(inputs: Inputs) -> tuple[int, str]:
    """Return the number of tokens or samples in a microbatch, and its unit.

    The first tensor that is not 0-dim decides. An integer or bool tensor of two or more dimensions
    holds tokens; otherwise, the size of the first dimension is the number of samples.

    Raises:
        ValueError: no input is a tensor with a batch dimension.
    """
    leaves = tree_leaves(dict(inputs) if isinstance(inputs, Mapping) else inputs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if not tensors:
        raise ValueError(
            "inputs: no tensor has a batch dimension; pass the inputs of a step on one rank"
        )
    first = tensors[0]
    if first.is_floating_point() or first.is_complex() or first.dim() < 2:
        return first.shape[0], "samples"
    return first.numel(), "tokens"


def num_recomputed(num_layers: int, part: float) -> int:
    """Return the number of leading layers to recompute, for a fraction ``part`` of all layers."""
    return round(num_layers * part)


def layer_lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    """Return the outermost lists of two or more layers of one type, by name.

    Raises:
        ValueError: there is no such list.
    """
    lists: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) < 2:
            continue
        is_inside = any(name.startswith(f"{outer}.") for outer in lists)
        if not is_inside and len({*map(type, module)}) == 1:
            lists[name] = module
    if not lists:
        raise ValueError(
            "recompute: the model has no nn.ModuleList with two or more layers of one type; use "
            "recompute=0"
        )
    return lists


def recompute_layers(model: nn.Module, part: float = 1) -> None:
    """Checkpoint the first fraction ``part`` of each list of layers, in place.

    If ``part`` is 1 and the model has ``gradient_checkpointing_enable``, call that instead.

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
        # A layer may be in the list several times.
        for layer in dict.fromkeys(layers[: num_recomputed(len(layers), part)]):
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


def recomputed_layers(model: nn.Module, part: float) -> tuple[str, ...]:
    """Return the layers that ``recompute_layers`` wraps if ``part`` < 1, as "model.layers[:3]"."""
    return tuple(
        re.sub(r"\.(\d+)\b", r"[\1]", f"model.{name}[:{num_recomputed(len(layers), part)}]")
        for name, layers in layer_lists(model).items()
    )


# --- transformers configurations -----------------------------------------------------------------

# Causal attention without a mask tensor, as a flash kernel computes it. In compiled graphs,
# transformers materializes a mask of all pairs of tokens, unless its attention is
# ``flash_attention_2`` or similar.
_ATTENTION = "graphshard_forecast"
_FLASH = "attention is a flash kernel without a mask, as with attn_implementation=flash_attention_2"


def is_function(model: str) -> bool:
    """Return whether ``model`` has the form FILE.py:FUNCTION."""
    return model.rpartition(":")[0].endswith(".py")


def _families() -> Any:
    try:
        from transformers import CONFIG_MAPPING
    except ImportError as error:
        raise ValueError(
            "building a model from a configuration needs transformers: pip install transformers"
        ) from error
    return CONFIG_MAPPING


def find_config(model: str) -> Any:
    """Build the configuration that ``model`` names; raise a ValueError if that fails."""
    public = PUBLIC_MODELS.get(model.lower())
    folder = None if public else config_folder(model)
    family, colon, text = (public or model).partition(":")
    if not (public or folder or (colon and family in _families())):
        raise ValueError(_unknown(model))
    families = _families()
    try:
        if folder is not None:
            from transformers import AutoConfig

            return AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        return _config_of_sizes(families[family], _parse_sizes(text))
    except Exception as error:  # configuration classes may raise any error
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{model}: cannot build this configuration: {type(error).__name__}: {reason}"
        ) from error


def _config_of_sizes(config_class: Any, sizes: Mapping[str, object]) -> Any:
    config = config_class(**sizes)
    # transformers keeps any argument as an attribute, and models read some that the class lacks,
    # such as ``head_dim``: refuse only what looks like a typo.
    known = {*vars(config_class()), *config_class.attribute_map}
    for name in sizes.keys() - known:
        if nearest := difflib.get_close_matches(name, known, n=1, cutoff=0.85):
            kind = config_class.__name__
            raise ValueError(f"{kind} has no {name!r}; did you mean {nearest[0]!r}?")
    return config


def _parse_sizes(text: str) -> dict[str, object]:
    sizes: dict[str, object] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"{part!r}: must be key=value")
        sizes[name.strip()] = _number(value.strip())
    return sizes


def _number(text: str) -> float | bool | str:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def config_workload(config: Any, name: str, batch: BatchShape) -> Workload:
    """Return the workload of a transformers configuration.

    Args:
        batch: microbatch; its length defaults to the model's number of positions.

    Raises:
        ValueError: there is no length, or it exceeds the number of learned positions; the model is
            neither a causal language model nor an image classifier; the configuration lacks the
            number of layers, or the size or channels of images; or there are no layers.
    """
    auto, make_inputs = _auto_class(config)
    is_image = auto.__name__.endswith("ImageClassification")
    for needed in ("num_hidden_layers", *(("num_channels", "image_size") if is_image else ())):
        if not hasattr(config, needed):
            raise ValueError(
                f"{name}: its configuration has no {needed}; pass FILE.py:FUNCTION, a function "
                "that returns the model and its inputs"
            )
    if config.num_hidden_layers < 1:
        raise ValueError(
            f"{name}: num_hidden_layers={config.num_hidden_layers}: must be at least 1"
        )

    def build(num_layers: int | None) -> Any:
        _register_attention()
        shallow = _with_layers(config, num_layers)
        return auto.from_config(shallow, attn_implementation=_ATTENTION)

    with torch.device("meta"):
        model = build(None)
    positions = _num_positions(model)
    length = batch.length or positions or getattr(config, "max_position_embeddings", None)
    if not is_image and length is None:
        raise ValueError(
            f"batch: {name} has no max_position_embeddings to use as the length: pass the number "
            f'of tokens per sample, as in --batch "{batch.size}x8192"'
        )
    if not is_image and positions and length and length > positions:
        raise ValueError(
            f"batch: {name} has only {positions} positions for {length} tokens: pass "
            f'--batch "{batch.size}x{positions}"'
        )

    def make(num_layers: int | None) -> tuple[nn.Module, Inputs]:
        return build(num_layers).train(), make_inputs(config, batch.size, length)

    return Workload(
        name,
        make,
        tokens=batch.size if is_image else batch.size * (length or 1),
        unit="samples" if is_image else "tokens",
        num_layers=config.num_hidden_layers,
        period=_layers_period(model),
        notes=(_FLASH,),
        parallelize=functools.partial(_split, name, None if is_image else length),
    )


def _split(name: str, length: int | None, model: nn.Module, mesh: DeviceMesh) -> None:
    if length and length % mesh.size():
        raise ValueError(
            f"tp={mesh.size()}: must divide the {length} tokens of a sample of {name}, as sequence "
            f"parallelism requires: pass --batch SAMPLESxTOKENS with a multiple of {mesh.size()} "
            "tokens"
        )
    parallelize(model, mesh)


def _auto_class(config: Any) -> tuple[Any, Any]:
    import transformers

    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM, _text
    if type(config) in transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        return transformers.AutoModelForImageClassification, _images
    raise ValueError(
        f"{config.model_type}: must be a causal language model or an image classifier; for other "
        "models pass FILE.py:FUNCTION, a function that returns the model and its inputs"
    )


def _text(config: Any, size: int, length: int) -> Inputs:
    ids = torch.zeros((size, length), dtype=torch.int64)
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def _images(config: Any, size: int, length: int | None) -> Inputs:
    pixels = torch.zeros((size, config.num_channels, config.image_size, config.image_size))
    return {"pixel_values": pixels, "labels": torch.zeros(size, dtype=torch.int64)}


def _with_layers(config: Any, num_layers: int | None) -> Any:
    config = copy.deepcopy(config)
    if num_layers is not None:
        lists = _lists_of_layers(config)
        config.num_hidden_layers = num_layers
        for name, items in lists.items():
            period = _period(items)
            while len(items) < num_layers:
                items.append(items[-period])
            setattr(config, name, items[:num_layers])
    return config


def scale_config(config: Any, factor: float, tp: int = 1) -> Any:
    """Return a configuration about ``factor`` times as wide and as deep.

    ``tp`` divides the new numbers of heads and the new intermediate size, unless ``factor`` is 1.

    Raises:
        ValueError: the configuration has no width, number of heads or number of layers.
    """
    for needed in ("hidden_size", "num_attention_heads", "num_hidden_layers"):
        if not hasattr(config, needed):
            raise ValueError(
                f"--largest: the configuration {config.model_type} has no {needed} to scale; pass "
                "that of a model with one stack of equally wide layers"
            )
    if factor == 1:
        return config
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", heads) or heads
    # The head size stays the same: the width grows by whole heads.
    new_kv_heads = max(1, round(kv_heads * factor / tp)) * tp
    ratio = new_kv_heads / kv_heads
    bigger = _with_layers(config, max(1, round(config.num_hidden_layers * ratio)))
    bigger.hidden_size = round(config.hidden_size * ratio)
    bigger.num_attention_heads = round(heads * ratio)
    if hasattr(config, "num_key_value_heads"):
        bigger.num_key_value_heads = new_kv_heads
    multiple = math.lcm(128, tp)
    for name in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        if size := getattr(config, name, None):
            setattr(bigger, name, max(1, round(size * ratio / multiple)) * multiple)
    return bigger


def _lists_of_layers(config: Any) -> dict[str, list[Any]]:
    """Return the lists with an item for each layer, such as ``layer_types``, by name."""
    number = config.num_hidden_layers
    return {
        name: items
        for name, items in vars(config).items()
        if "layer" in name and isinstance(items, list) and len(items) == number
        # Numbers of layers, such as ``moe_layers`` of Llama 4, say nothing about their kinds.
        if items != list(range(number))
    }


def _layers_period(model: Any) -> int:
    """Return the number of layers in the repeating pattern of a transformers model.

    Layers are of one kind if they have the same modules, shapes of parameters, and items in the
    configuration's lists. The first layers, as many as the pattern has, may be of other kinds.
    """
    number = model.config.num_hidden_layers
    layers = [
        [_structure(layer) for layer in module]
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) == number
    ]
    kinds = zip([None] * number, *layers, *_lists_of_layers(model.config).values())
    return _period(list(kinds))


def _structure(layer: nn.Module) -> tuple[object, ...]:
    modules = [(name, type(module)) for name, module in layer.named_modules()]
    return modules, [(name, param.shape) for name, param in layer.named_parameters()]


def _period(items: Sequence[object]) -> int:
    """Return the least period of ``items``; the first may be irregular if two others follow."""
    number = len(items)

    def repeats(period: int) -> bool:
        start = period if 3 * period <= number else 0
        return all(a == b for a, b in zip(items[start:], items[start + period :]))

    return next(filter(repeats, range(1, number + 1)))


def _num_positions(model: Any) -> int | None:
    """Return the number of tokens for which a transformers model has learned positions, if any."""
    if positions := getattr(model.config, "n_positions", None):
        return int(positions)
    most = getattr(model.config, "max_position_embeddings", None) or 0
    for name, table in model.named_modules():
        # Some tables begin with rows that are not positions.
        if isinstance(table, nn.Embedding) and "position" in name:
            unused = 0 if table.padding_idx is None else table.padding_idx + 1
            unused += getattr(table, "offset", 0)
            if table.num_embeddings - most in (0, unused):
                return table.num_embeddings - unused
    return None


def _register_attention() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(_ATTENTION, sdpa_attention_forward)
    AttentionMaskInterface.register(_ATTENTION, lambda *args, **kwargs: None)  # no mask
