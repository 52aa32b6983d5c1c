"""Sizes of public models, from the sources named in the table; folders of configurations.

Vocabulary and feed-forward sizes that a source omits are from the model's ``config.json`` on the
Hugging Face Hub.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

# ``model_type`` of a transformers configuration, and arguments of the configuration class.
PublicModel = tuple[str, Mapping[str, object]]


def _decoder(
    family: str,
    hidden: int,
    feed_forward: int,
    layers: int,
    heads: tuple[int, int],
    vocab: int,
    **more: object,
) -> PublicModel:
    # ``heads``: numbers of query heads and of key-value heads.
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": vocab,
        **more,
    }
    return family, sizes


def _gpt2(hidden: int, layers: int, heads: int) -> PublicModel:
    sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": 1024}
    # No dropout: with it, attention is not a flash kernel on the CPU, where graphs are traced.
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    return "gpt2", {**sizes, **dropout}


def _vit(hidden: int, feed_forward: int, layers: int, heads: int, patch: int) -> PublicModel:
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "patch_size": patch,
        "image_size": 224,
        "num_labels": 1000,
    }
    return "vit", sizes


PUBLIC_MODELS: dict[str, PublicModel] = {  # keyed by lower-case name
    # arXiv 2407.21783, table 3.
    "llama3-8b": _decoder("llama", 4096, 14336, 32, (32, 8), 128256),
    "llama3-70b": _decoder("llama", 8192, 28672, 80, (64, 8), 128256),
    "llama3-405b": _decoder("llama", 16384, 53248, 126, (128, 8), 128256),
    # arXiv 2412.15115, table 1.
    "qwen2.5-7b": _decoder("qwen2", 3584, 18944, 28, (28, 4), 152064),
    "qwen2.5-72b": _decoder("qwen2", 8192, 29568, 80, (64, 8), 152064),
    # arXiv 2505.09388, table 1.
    "qwen3-0.6b": _decoder(
        "qwen3", 1024, 3072, 28, (16, 8), 151936, head_dim=128, tie_word_embeddings=True
    ),
    "qwen3-8b": _decoder("qwen3", 4096, 12288, 36, (32, 8), 151936, head_dim=128),
    "qwen3-32b": _decoder("qwen3", 5120, 25600, 64, (64, 8), 151936, head_dim=128),
    # arXiv 2505.09388, table 2; width of an expert from the config of Qwen/Qwen3-30B-A3B.
    "qwen3-30b-a3b": _decoder(
        "qwen3_moe",
        2048,
        6144,
        48,
        (32, 4),
        151936,
        head_dim=128,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
    ),
    # arXiv 2401.04088, table 1.
    "mixtral-8x7b": _decoder(
        "mixtral",
        4096,
        14336,
        32,
        (32, 8),
        32000,
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
    # Radford et al. 2019, "Language models are unsupervised multitask learners", table 2.
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    # arXiv 2010.11929, table 1.
    "vit-b16": _vit(768, 3072, 12, 12, 16),
    "vit-l16": _vit(1024, 4096, 24, 16, 16),
    "vit-h14": _vit(1280, 5120, 32, 16, 14),
}


def is_hub_name(model: str) -> bool:
    """Return whether ``model`` has the form OWNER/NAME."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model) is not None


def config_folder(model: str) -> Path | None:
    """Return the folder with the config.json of ``model``, also in the Hub's cache, or None."""
    if (Path(model) / "config.json").is_file():
        return Path(model)
    if not is_hub_name(model):
        return None
    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(model, "config.json")
    except (ImportError, ValueError):  # ValueError: not a name on the Hub
        return None
    return Path(cached).parent if isinstance(cached, str) else None
