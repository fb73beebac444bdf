"""Llama and what shares its shape: Llama 1-3.3, SmolLM 1 and 2, TinyLlama, Yi; in GGUF files Mistral and Mixtral too."""

from __future__ import annotations

from octavo.models.families.base import (
    Family,
    GgufLayout,
    attention_spec,
    config_names,
    mlp_spec,
    model_spec,
    moe_spec,
    num_layers,
)
from octavo.models.fields import Config
from octavo.models.spec import LayerSpec, ModelSpec


def from_config(config: Config) -> ModelSpec:
    """A spec of a `config.json`."""
    bias = bool(config.get("attention_bias", False))
    attention = attention_spec(config, qkv_bias=bias, output_bias=bool(config.get("attention_output_bias", bias)))
    mlp = (
        moe_spec(config, "intermediate_size")
        if config.get("num_experts")
        else mlp_spec(config, bias=bool(config.get("mlp_bias", False)))
    )
    return model_spec("llama", config, (LayerSpec(attention, mlp),) * num_layers(config))


FAMILY = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    from_config=from_config,
    names=config_names(),
    gguf=GgufLayout(("llama",), pair_order=True),
)
