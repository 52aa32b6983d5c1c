"""A table of public models with sources, and a lookup of other models' configurations.

Vocabulary and feed-forward sizes that a source omits are from the model's ``config.json`` on the
Hugging Face Hub.
"""

from __future__ import annotations

import re
from pathlib import Path

# No dropout: with it, attention on a CPU is not a flash kernel.
_GPT2 = "n_positions=1024,attn_pdrop=0.0,embd_pdrop=0.0,resid_pdrop=0.0"

# FAMILY:key=value,.., where FAMILY is a ``model_type`` of transformers, keyed by lower-case name.
PUBLIC_MODELS = {
    # arXiv 2407.21783, table 3.
    "llama3-8b": "llama:hidden_size=4096,intermediate_size=14336,num_hidden_layers=32,"
    "num_attention_heads=32,num_key_value_heads=8,vocab_size=128256",
    "llama3-70b": "llama:hidden_size=8192,intermediate_size=28672,num_hidden_layers=80,"
    "num_attention_heads=64,num_key_value_heads=8,vocab_size=128256",
    "llama3-405b": "llama:hidden_size=16384,intermediate_size=53248,num_hidden_layers=126,"
    "num_attention_heads=128,num_key_value_heads=8,vocab_size=128256",
    # arXiv 2412.15115, table 1.
    "qwen2.5-7b": "qwen2:hidden_size=3584,intermediate_size=18944,num_hidden_layers=28,"
    "num_attention_heads=28,num_key_value_heads=4,vocab_size=152064",
    "qwen2.5-72b": "qwen2:hidden_size=8192,intermediate_size=29568,num_hidden_layers=80,"
    "num_attention_heads=64,num_key_value_heads=8,vocab_size=152064",
    # arXiv 2505.09388, table 1.
    "qwen3-0.6b": "qwen3:hidden_size=1024,intermediate_size=3072,num_hidden_layers=28,"
    "num_attention_heads=16,num_key_value_heads=8,vocab_size=151936,head_dim=128,"
    "tie_word_embeddings=True",
    "qwen3-8b": "qwen3:hidden_size=4096,intermediate_size=12288,num_hidden_layers=36,"
    "num_attention_heads=32,num_key_value_heads=8,vocab_size=151936,head_dim=128",
    "qwen3-32b": "qwen3:hidden_size=5120,intermediate_size=25600,num_hidden_layers=64,"
    "num_attention_heads=64,num_key_value_heads=8,vocab_size=151936,head_dim=128",
    # arXiv 2505.09388, table 2; width of an expert from the config of Qwen/Qwen3-30B-A3B.
    "qwen3-30b-a3b": "qwen3_moe:hidden_size=2048,intermediate_size=6144,num_hidden_layers=48,"
    "num_attention_heads=32,num_key_value_heads=4,vocab_size=151936,head_dim=128,"
    "moe_intermediate_size=768,num_experts=128,num_experts_per_tok=8,norm_topk_prob=True",
    # arXiv 2401.04088, table 1.
    "mixtral-8x7b": "mixtral:hidden_size=4096,intermediate_size=14336,num_hidden_layers=32,"
    "num_attention_heads=32,num_key_value_heads=8,vocab_size=32000,num_local_experts=8,"
    "num_experts_per_tok=2",
    # Radford et al. 2019, "Language models are unsupervised multitask learners", table 2.
    "gpt2": f"gpt2:n_embd=768,n_layer=12,n_head=12,{_GPT2}",
    "gpt2-medium": f"gpt2:n_embd=1024,n_layer=24,n_head=16,{_GPT2}",
    "gpt2-large": f"gpt2:n_embd=1280,n_layer=36,n_head=20,{_GPT2}",
    "gpt2-xl": f"gpt2:n_embd=1600,n_layer=48,n_head=25,{_GPT2}",
    # arXiv 2010.11929, table 1.
    "vit-b16": "vit:hidden_size=768,intermediate_size=3072,num_hidden_layers=12,"
    "num_attention_heads=12,patch_size=16,image_size=224,num_labels=1000",
    "vit-l16": "vit:hidden_size=1024,intermediate_size=4096,num_hidden_layers=24,"
    "num_attention_heads=16,patch_size=16,image_size=224,num_labels=1000",
    "vit-h14": "vit:hidden_size=1280,intermediate_size=5120,num_hidden_layers=32,"
    "num_attention_heads=16,patch_size=14,image_size=224,num_labels=1000",
}


def is_hub_name(model: str) -> bool:
    """Return whether ``model`` has the form OWNER/NAME."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model) is not None


def config_folder(model: str) -> Path | None:
    """Return the folder with the config.json of ``model``, local or in the Hub cache, or None."""
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
