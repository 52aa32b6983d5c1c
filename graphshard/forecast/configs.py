"""Build models from transformers configurations, with any number of layers.

Attention is causal scaled dot product attention without a mask tensor, as a flash kernel computes
it. In compiled graphs transformers itself materializes a mask of all pairs of tokens, unless its
attention is ``flash_attention_2`` or similar.
"""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .public_models import PUBLIC_MODELS
from .trace import Inputs

_ATTENTION = "graphshard_forecast"
_FLASH = "attention is a flash kernel without a mask, as with attn_implementation that has one"


def is_config(model: str) -> bool:
    """Return whether ``model`` names a configuration: a folder, ``FAMILY:..`` or a public model."""
    family, colon, _ = model.partition(":")
    return (
        model.lower() in PUBLIC_MODELS
        or (Path(model) / "config.json").is_file()
        or bool(colon and not family.endswith(".py") and family in _families())
    )


def _families() -> Any:
    try:
        from transformers import CONFIG_MAPPING
    except ImportError as error:
        raise ValueError(
            "models by configuration need transformers: pip install transformers"
        ) from error
    return CONFIG_MAPPING


def find_config(model: str) -> Any:
    """Return the configuration that ``model`` names.

    Raises:
        ValueError: it cannot be built.
    """
    families = _families()
    try:
        if model.lower() in PUBLIC_MODELS:
            public = PUBLIC_MODELS[model.lower()]
            return families[public.family](**public.sizes)
        if (Path(model) / "config.json").is_file():
            from transformers import AutoConfig

            return AutoConfig.from_pretrained(model, local_files_only=True)
        family, _, sizes = model.partition(":")
        return families[family](**_sizes(sizes))
    except Exception as error:  # a configuration may raise anything
        reason = " ".join(str(error).split())
        raise ValueError(f"{model}: this configuration cannot be built: {reason}") from error


def _sizes(text: str) -> dict[str, Any]:
    sizes: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"{part!r} is no key=value")
        sizes[name.strip()] = _number(value.strip())
    return sizes


def _number(text: str) -> Any:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def config_workload(
    config: Any, name: str, size: int, length: int | None
) -> tuple[str, Any, int, str, int, int, tuple[str, ...]]:
    """Return the fields of a ``Workload``.

    Args:
        size: number of samples in a microbatch.
        length: number of tokens in a sample; None: as many as the model has positions.

    Raises:
        ValueError: ``length`` is missing or exceeds the model's positions, or the model is neither
            a causal language model nor an image classifier.
    """
    auto, inputs_of = _auto_class(config)
    is_image = auto.__name__.endswith("ImageClassification")
    length = length or getattr(config, "max_position_embeddings", None)
    if not is_image and length is None:
        raise ValueError(f'{name}: say how many tokens a sample has, as in --batch "1x8192"')
    positions = getattr(config, "n_positions", None)
    if positions and length and length > positions:
        raise ValueError(
            f"batch: {name} has positions for {positions} tokens, and not for {length}: give "
            f'--batch "{size}x{positions}"'
        )

    def make(num_layers: int | None) -> tuple[nn.Module, Inputs]:
        _know_attention()
        shallow = _with_layers(config, num_layers)
        model = auto.from_config(shallow, attn_implementation=_ATTENTION)
        return model.train(), inputs_of(config, size, length)

    tokens, unit = (size, "samples") if is_image else (size * (length or 1), "tokens")
    return name, make, tokens, unit, config.num_hidden_layers, _period(config), (_FLASH,)


def _auto_class(config: Any) -> tuple[Any, Any]:
    """Return the auto class for ``config``, and the function that makes its inputs."""
    import transformers

    choices = (
        (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.AutoModelForCausalLM, _text),
        (
            transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
            transformers.AutoModelForImageClassification,
            _images,
        ),
    )
    for known, auto, inputs_of in choices:
        if type(config) in known:
            return auto, inputs_of
    raise ValueError(
        f"{config.model_type}: neither a causal language model nor an image classifier; give "
        "FILE.py:FUNCTION, which returns model and inputs"
    )


def _text(config: Any, size: int, length: int) -> Inputs:
    ids = torch.zeros((size, length), dtype=torch.int64)
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def _images(config: Any, size: int, length: int | None) -> Inputs:
    pixels = torch.zeros((size, config.num_channels, config.image_size, config.image_size))
    return {"pixel_values": pixels, "labels": torch.zeros(size, dtype=torch.int64)}


def _with_layers(config: Any, num_layers: int | None) -> Any:
    """Return a copy of ``config`` with ``num_layers`` layers; None: as many as it has."""
    config = copy.deepcopy(config)
    if num_layers is not None:
        config.num_hidden_layers = num_layers
        if getattr(config, "layer_types", None):
            times = -(-num_layers // len(config.layer_types))
            config.layer_types = (config.layer_types * times)[:num_layers]
    return config


def scaled(config: Any, factor: float) -> Any:
    """Return a configuration about ``factor`` times as wide and as deep.

    The head size stays the same, so the width is a whole number of heads.
    """
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", heads) or heads
    new_kv_heads = max(1, round(kv_heads * factor))
    ratio = new_kv_heads / kv_heads
    bigger = _with_layers(config, max(1, round(config.num_hidden_layers * ratio)))
    bigger.hidden_size = round(config.hidden_size * ratio)
    bigger.num_attention_heads = round(heads * ratio)
    if hasattr(config, "num_key_value_heads"):
        bigger.num_key_value_heads = new_kv_heads
    if getattr(config, "intermediate_size", None):
        bigger.intermediate_size = round(config.intermediate_size * ratio / 128) * 128 or 128
    return bigger


def _period(config: Any) -> int:
    """Return the number of layers after which the layer types repeat."""
    types = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    periods = range(1, len(types) + 1)
    return next(p for p in periods if all(a == b for a, b in zip(types, types[p:])))


def _know_attention() -> None:
    """Register an attention without a mask in transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(_ATTENTION, sdpa_attention_forward)
    AttentionMaskInterface.register(_ATTENTION, _no_mask)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None
