"""Qwen3: a norm of each query and key head instead of Qwen2's biases."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.families.base import Family, GgufLayout, attention_spec, config_names, mlp_spec, model_spec
from octavo.models.families.qwen2 import layer_windows
from octavo.models.fields import Config
from octavo.models.spec import AttentionSpec, LayerSpec, ModelSpec


def attention_of(config: Config) -> AttentionSpec:
    """The attention of all Qwen3 models."""
    bias = bool(config.get("attention_bias", False))
    return attention_spec(config, qk_norm="head", qkv_bias=bias, output_bias=bias)


def from_config(config: Config) -> ModelSpec:
    """A spec of a `config.json`."""
    attention, mlp = attention_of(config), mlp_spec(config)
    layers = [LayerSpec(replace(attention, window=window), mlp) for window in layer_windows(config)]
    return model_spec("qwen3", config, layers)


FAMILY = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    from_config=from_config,
    names=config_names(),
    gguf=GgufLayout(("qwen3",)),
)
