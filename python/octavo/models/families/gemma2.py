"""Gemma 2: norms around each block, soft caps, and a window in every other layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.models.families.base import (
    Family,
    GgufLayout,
    attention_spec,
    config_names,
    head_dim,
    mlp_spec,
    model_spec,
    num_layers,
    windows,
)
from octavo.models.fields import MAX_HEAD_DIM, MAX_HEADS, MAX_WIDTH, Config, expect, integer, number, optional_number
from octavo.models.spec import AttentionSpec, LayerSpec, ModelSpec

NAMES = config_names(
    attn_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)


def attention_of(config: Config, **changes: Any) -> AttentionSpec:
    """The attention of Gemma 2 and 3."""
    expect(config, "use_bidirectional_attention", False, None)
    bias = bool(config.get("attention_bias", False))
    fields = {
        "scale": number(config, "query_pre_attn_scalar") ** -0.5,
        "softcap": optional_number(config, "attn_logit_softcapping"),
        "qkv_bias": bias,
        "output_bias": bias,
    }
    return attention_spec(config, **fields | changes)


def model_of(family: str, config: Config, attentions: list[AttentionSpec]) -> ModelSpec:
    """A Gemma of layers that differ in their attention."""
    mlp = mlp_spec(config)
    return model_spec(
        family,
        config,
        [LayerSpec(attention, mlp, post_norm=True) for attention in attentions],
        norm_offset=1.0,
        embedding_scale=float(integer(config, "hidden_size", MAX_WIDTH)) ** 0.5,
        logit_softcap=optional_number(config, "final_logit_softcapping"),
    )


def from_config(config: Config) -> ModelSpec:
    """A spec of a `config.json`."""
    attention = attention_of(config)
    layers = windows(config, lambda index: index % 2 == 0)
    return model_of("gemma2", config, [replace(attention, window=window) for window in layers])


def score_scalar(config: Config, layers_of_27b: int) -> Mapping[str, Any]:
    """`query_pre_attn_scalar`, which GGUF files leave out: the head size, but for the 27B models, told by their layers."""
    if num_layers(config) != layers_of_27b:
        return {"query_pre_attn_scalar": integer({"head_dim": head_dim(config)}, "head_dim", MAX_HEAD_DIM)}
    hidden, heads = integer(config, "hidden_size", MAX_WIDTH), integer(config, "num_attention_heads", MAX_HEADS)
    return {"query_pre_attn_scalar": hidden // heads}


FAMILY = Family(
    name="gemma2",
    architectures=("Gemma2ForCausalLM",),
    from_config=from_config,
    names=NAMES,
    defaults={
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    gguf=GgufLayout(("gemma2",), derive=lambda config: score_scalar(config, 46)),
)
