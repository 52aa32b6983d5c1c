"""Six small models of different kinds that ``forecast_cpu`` measures and predicts.

A step takes about 0.1 to 0.3 seconds on one CPU core.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from .gpt import GPT
from .llama import Llama, LlamaSizes

VOCAB, LENGTH = 2048, 256


class Made(NamedTuple):
    """A model, and the positional or keyword arguments of one step on one rank."""

    model: nn.Module
    inputs: dict[str, Any] | tuple[Any, ...]


def _ids(rows: int, length: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (rows, length))


def gpt() -> Made:
    """Return a GPT with LayerNorm and GELU."""
    device = torch.device("cpu")
    sizes = {"dim": 384, "layers": 6, "head_dim": 64}
    model = GPT.seeded(device, **sizes, vocab=VOCAB, context=LENGTH)
    return Made(model, (model.batch(1, device),))


def llama() -> Made:
    """Return a Llama with grouped queries."""
    ids = _ids(1, LENGTH)
    sizes = LlamaSizes(384, 6, 6, 2, 1024, recompute=False, vocab=VOCAB)
    return Made(Llama(sizes), (ids, ids))


def vit() -> Made:
    """Return a vision transformer."""
    import transformers

    config = transformers.ViTConfig(
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=6,
        intermediate_size=1536,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        image_size=224,
        patch_size=16,
        num_labels=100,
        problem_type="single_label_classification",
    )
    return Made(transformers.ViTForImageClassification(config), _images(1, 224))


def convnet() -> Made:
    """Return a residual network."""
    import transformers

    config = transformers.ResNetConfig(
        embedding_size=32,
        hidden_sizes=[64, 128, 256, 512],
        depths=[2, 2, 2, 2],
        layer_type="basic",
        num_labels=100,
        problem_type="single_label_classification",
    )
    return Made(transformers.ResNetForImageClassification(config), _images(4, 96))


def _images(rows: int, size: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(rows, 3, size, size), "labels": torch.arange(rows)}


def t5() -> Made:
    """Return an encoder and a decoder with relative positions."""
    import transformers

    config = transformers.T5Config(
        vocab_size=VOCAB,
        d_model=320,
        d_kv=64,
        d_ff=1280,
        num_layers=4,
        num_heads=5,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    ids = {"input_ids": _ids(1, LENGTH), "labels": _ids(1, LENGTH // 2)}
    return Made(transformers.T5ForConditionalGeneration(config), ids)


def moe() -> Made:
    """Return a mixture of experts: four experts per layer, two per token."""
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    ids = _ids(1, LENGTH)
    return Made(transformers.MixtralForCausalLM(config), {"input_ids": ids, "labels": ids})


MODELS: dict[str, Callable[[], Made]] = {
    "GPT": gpt,
    "Llama": llama,
    "ViT": vit,
    "convnet": convnet,
    "T5": t5,
    "MoE": moe,
}
