"""Granite 3: Llama with multipliers of embeddings, residuals, scores and logits."""

from __future__ import annotations

from octavo.models.families.base import (
    Family,
    GgufLayout,
    attention_spec,
    config_names,
    mlp_spec,
    model_spec,
    num_layers,
)
from octavo.models.fields import Config, number
from octavo.models.spec import LayerSpec, ModelSpec


def from_config(config: Config) -> ModelSpec:
    """A spec of a `config.json`."""
    bias = bool(config.get("attention_bias", False))
    attention = attention_spec(
        config, scale=number(config, "attention_multiplier", 1.0), qkv_bias=bias, output_bias=bias
    )
    layer = LayerSpec(attention, mlp_spec(config, bias=bool(config.get("mlp_bias", False))))
    return model_spec(
        "granite",
        config,
        (layer,) * num_layers(config),
        embedding_scale=number(config, "embedding_multiplier", 1.0),
        residual_scale=number(config, "residual_multiplier", 1.0),
        logit_scale=1.0 / number(config, "logits_scaling", 1.0),
    )


FAMILY = Family(
    name="granite",
    architectures=("GraniteForCausalLM",),
    from_config=from_config,
    names=config_names(),
    gguf=GgufLayout(("granite",), pair_order=True),
)
