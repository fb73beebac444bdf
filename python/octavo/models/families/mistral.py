"""Mistral 7B, Nemo, Small, Ministral: Llama with a sliding window in the first releases."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.families.base import Family, attention_spec, config_names, mlp_spec, model_spec, windows
from octavo.models.fields import Config
from octavo.models.spec import LayerSpec, ModelSpec


def from_config(config: Config) -> ModelSpec:
    """A spec of a `config.json`."""
    attention, mlp = attention_spec(config), mlp_spec(config)
    layers = [LayerSpec(replace(attention, window=window), mlp) for window in windows(config, lambda index: True)]
    return model_spec("mistral", config, layers)


FAMILY = Family(
    name="mistral",
    architectures=("MistralForCausalLM",),
    from_config=from_config,
    names=config_names(),
    defaults={"sliding_window": 4096},
)
