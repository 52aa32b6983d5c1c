"""Models of libraries other than `transformers`: peft, diffusers and sentence-transformers.

All are built from tiny configs, without downloads or dropout.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .models import Entry, causal_batch, llama
from .words import WORDS, tokenizer

# --- peft ----------------------------------------------------------------------------------------


def _adapted(config: str, **changes: Any) -> nn.Module:
    import peft

    base = llama(num_hidden_layers=1)
    model = peft.get_peft_model(base, getattr(peft, config)(task_type="CAUSAL_LM", **changes))
    for name, param in model.named_parameters():
        # Initially zeros or ones, for which gradients are zero or equal.
        if "lora_B" in name or "ia3" in name:
            nn.init.normal_(param, mean=float("ia3" in name), std=0.1)
    return model


def dora() -> nn.Module:
    return _adapted("LoraConfig", r=3, target_modules=["q_proj", "v_proj"], use_dora=True)


def lora_with_saved_modules() -> nn.Module:
    return _adapted("LoraConfig", r=3, target_modules=["q_proj"], modules_to_save=["lm_head"])


def ia3() -> nn.Module:
    targets = ["k_proj", "v_proj", "down_proj"]
    return _adapted("IA3Config", target_modules=targets, feedforward_modules=["down_proj"])


def prompt_tuning() -> nn.Module:
    return _adapted("PromptTuningConfig", num_virtual_tokens=5)


# --- diffusers -----------------------------------------------------------------------------------

CHANNELS, CONTEXT = 4, 20


def unet() -> nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        block_out_channels=(12, 20),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=CONTEXT,
        attention_head_dim=2,
        norm_num_groups=4,
        mid_block_type=None,
    )


def dit() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    return DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=10,
        in_channels=CHANNELS,
        num_layers=1,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=11,
        dropout=0.0,
        norm_num_groups=2,
        attention_bias=False,
    ).eval()  # in training mode it drops classes at random


def noise_batch(rng: torch.Generator) -> dict[str, Tensor]:
    return {
        "latents": torch.randn(2, CHANNELS, 8, 8, generator=rng),
        "noise": torch.randn(2, CHANNELS, 8, 8, generator=rng),
        "times": torch.randint(1000, (2,), generator=rng),
        "texts": torch.randn(2, 6, CONTEXT, generator=rng),
        "classes": torch.randint(11, (2,), generator=rng),
    }


def _noisy(batch: Mapping[str, Tensor]) -> Tensor:
    from diffusers import DDPMScheduler

    return DDPMScheduler().add_noise(batch["latents"], batch["noise"], batch["times"])


def unet_loss(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the loss that train_text_to_image.py computes."""
    predicted = model(_noisy(batch), batch["times"], batch["texts"], return_dict=False)[0]
    return F.mse_loss(predicted, batch["noise"])


def dit_loss(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    predicted = model(
        _noisy(batch), timestep=batch["times"], class_labels=batch["classes"], return_dict=False
    )[0]
    return F.mse_loss(predicted, batch["noise"])


# --- sentence-transformers -----------------------------------------------------------------------


def sentences() -> nn.Module:
    import transformers
    from safetensors.torch import save_file
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Normalize, Pooling, Transformer

    config = transformers.BertConfig(
        vocab_size=len(WORDS) + 3,
        hidden_size=18,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=25,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    with tempfile.TemporaryDirectory() as folder:
        # Without a pooler, which sentence embeddings do not use.
        bert = transformers.BertModel(config, add_pooling_layer=False)
        # Instead of save_pretrained, which writes only on the first rank.
        bert.config.to_json_file(f"{folder}/config.json", use_diff=False)
        save_file(bert.state_dict(), f"{folder}/model.safetensors", {"format": "pt"})
        tokenizer().save_pretrained(folder)
        embed = Transformer(folder, model_kwargs={"add_pooling_layer": False})
    for name, param in embed.named_parameters():
        if name.endswith("key.bias"):  # its gradient is zero except for rounding
            param.requires_grad_(False)
    pooling = Pooling(embed.get_embedding_dimension())
    return SentenceTransformer(modules=[embed, pooling, Normalize()], device="cpu")


def pairs_batch(rng: torch.Generator) -> list[dict[str, Tensor]]:
    columns = []
    for length in (6, 9):
        ids = torch.randint(3, len(WORDS) + 3, (3, length), generator=rng)
        mask = torch.ones_like(ids)
        mask[1, length - 2 :] = 0
        columns.append({"input_ids": ids, "attention_mask": mask})
    return columns


def ranking_loss(model: Any, batch: list[dict[str, Tensor]]) -> Tensor:
    """Return the loss that `SentenceTransformerTrainer.compute_loss` computes."""
    from sentence_transformers.losses import MultipleNegativesRankingLoss

    loss: Tensor = MultipleNegativesRankingLoss(model)([dict(column) for column in batch], None)
    return loss


LIBRARIES: dict[str, Entry] = {
    "peft-dora": Entry(dora, causal_batch),
    "peft-modules-to-save": Entry(lora_with_saved_modules, causal_batch),
    "peft-ia3": Entry(ia3, causal_batch),
    "peft-prompt-tuning": Entry(prompt_tuning, causal_batch),
    "diffusers-unet": Entry(unet, noise_batch, unet_loss),
    "diffusers-dit": Entry(dit, noise_batch, dit_loss),
    "sentence-transformers": Entry(sentences, pairs_batch, ranking_loss),
}
