"""The models of the zoo: tiny, unmodified models of `transformers`, built without downloads.

They have no dropout, so that runs can be compared. Sizes of vocabularies and most MLPs are odd, so
some shards are padded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn

if TYPE_CHECKING:  # importing takes seconds, so only ranks do
    from transformers import PreTrainedModel

VOCAB, LENGTH, LABELS = 101, 12, 5
IGNORED = -100  # label of tokens ignored by the loss

Batch = dict[str, Tensor]


def model_loss(model: Any, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


@dataclass(frozen=True)
class Entry:
    """One model of the zoo.

    Attributes:
        build: function that builds the model with random weights.
        batch: function that draws a batch; the generator differs by rank and step.
        loss: function that computes a loss from the model, which may be compiled, and a batch.
        one_graph: whether Dynamo traces the model without a graph break.
        all_used: whether every parameter has a gradient in every step.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Any]
    loss: Callable[[Any, Any], Tensor] = model_loss
    one_graph: bool = True
    all_used: bool = True


def causal_batch(generator: torch.Generator, rows: int = 2, length: int = LENGTH) -> Batch:
    ids = torch.randint(3, VOCAB, (rows, length), generator=generator)
    return {"input_ids": ids, "labels": ids}


def masked_batch(generator: torch.Generator) -> Batch:
    ids = torch.randint(3, VOCAB, (2, LENGTH), generator=generator)
    guessed = torch.rand(ids.shape, generator=generator) < 0.4
    guessed[:, 0] = True
    mask = torch.ones_like(ids)
    mask[1, LENGTH - 3 :] = 0
    labels = ids.masked_fill(~guessed | (mask == 0), IGNORED)
    return {"input_ids": ids.masked_fill(guessed, 2), "attention_mask": mask, "labels": labels}


def translation_batch(generator: torch.Generator) -> Batch:
    source = torch.randint(3, VOCAB, (2, LENGTH), generator=generator)
    target = torch.randint(3, VOCAB, (2, LENGTH - 5), generator=generator)
    return {"input_ids": source, "labels": target}


def image_batch(generator: torch.Generator) -> Batch:
    pixels = torch.randn(3, 3, 16, 16, generator=generator)
    return {
        "pixel_values": pixels,
        "labels": torch.randint(LABELS, (3,), generator=generator),
    }


def few_tokens_batch(generator: torch.Generator) -> Batch:
    """Return a batch of three tokens, in which usually some expert gets none."""
    return causal_batch(generator, rows=1, length=3)


_DECODER: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=45,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    use_cache=False,
)
# grouped_mm requires rows of a multiple of 16 bytes.
_MIXTURE: dict[str, Any] = dict(
    _DECODER,
    num_hidden_layers=1,
    intermediate_size=44,
    num_local_experts=4,
    num_experts_per_tok=2,
)
_ENCODER: dict[str, Any] = dict(
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=45,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)


def gpt2(**changes: Any) -> PreTrainedModel:
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=32,
        n_embd=32,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
        **{"n_layer": 2, **changes},
    )
    return transformers.GPT2LMHeadModel(config)


def gpt2_with_loss(**changes: Any) -> PreTrainedModel:
    """Return a GPT-2 with its loss type set.

    Otherwise transformers chooses the same loss but logs a message, which breaks the graph.
    """
    model = gpt2(**changes)
    model.loss_type = "ForCausalLM"
    return model


def llama(**changes: Any) -> PreTrainedModel:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**_DECODER, **changes}))


def llama_checkpointed() -> PreTrainedModel:
    model = llama(num_hidden_layers=1)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def qwen3() -> PreTrainedModel:
    config = transformers.Qwen3Config(**{**_DECODER, "num_hidden_layers": 1}, head_dim=8)
    return transformers.Qwen3ForCausalLM(config)


def bert(**changes: Any) -> PreTrainedModel:
    config = transformers.BertConfig(
        **_ENCODER, vocab_size=VOCAB, max_position_embeddings=32, **changes
    )
    return transformers.BertForMaskedLM(config)


def t5() -> PreTrainedModel:
    config = transformers.T5Config(
        vocab_size=VOCAB,
        d_model=32,
        d_kv=8,
        d_ff=45,
        num_layers=1,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def vit() -> PreTrainedModel:
    config = transformers.ViTConfig(
        **_ENCODER,
        image_size=16,
        patch_size=4,
        num_labels=LABELS,
        # Otherwise, the first forward sets this attribute, and Dynamo has to retrace.
        problem_type="single_label_classification",
    )
    return transformers.ViTForImageClassification(config)


def mixtral(**changes: Any) -> PreTrainedModel:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**_MIXTURE, **changes))


def mixtral_eager() -> PreTrainedModel:
    """Return a Mixtral with a loop over experts that have tokens, which Dynamo cannot trace."""
    return mixtral(
        experts_implementation="eager",
        output_router_logits=True,
        router_aux_loss_coef=0.1,
    )


# Dynamo in torch 2.11 cannot trace copy.deepcopy, with which T5 copies its config.
_TRACES_DEEPCOPY = torch.__version__ >= (2, 13)

ZOO: dict[str, Entry] = {
    "gpt2": Entry(lambda: gpt2_with_loss(n_layer=1), causal_batch),
    "gpt2-eager-attention": Entry(
        lambda: gpt2_with_loss(n_layer=1, attn_implementation="eager"), causal_batch
    ),
    # Without a loss type, and with unused parameters: cross attention without an encoder.
    "gpt2-breaks-unused": Entry(
        lambda: gpt2(n_layer=1, add_cross_attention=True),
        causal_batch,
        one_graph=False,
        all_used=False,
    ),
    "llama": Entry(llama, causal_batch),
    "llama-shallow": Entry(lambda: llama(num_hidden_layers=1), causal_batch),
    "llama-tied": Entry(lambda: llama(num_hidden_layers=1, tie_word_embeddings=True), causal_batch),
    "llama-checkpointed": Entry(llama_checkpointed, causal_batch),
    "qwen3": Entry(qwen3, causal_batch),
    "bert": Entry(bert, masked_batch),
    "t5": Entry(t5, translation_batch, one_graph=_TRACES_DEEPCOPY),
    "vit": Entry(vit, image_batch),
    "mixtral": Entry(mixtral, causal_batch),
    "mixtral-breaks": Entry(mixtral_eager, few_tokens_batch, one_graph=False),
}
