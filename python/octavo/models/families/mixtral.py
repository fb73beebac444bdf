"""Mixtral 8x7B and 8x22B: Mistral with eight experts in each layer."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.families.base import Family, attention_spec, config_names, model_spec, moe_spec, windows
from octavo.models.fields import Config
from octavo.models.spec import LayerSpec, ModelSpec


def from_config(config: Config) -> ModelSpec:
    """A spec of a `config.json`."""
    attention, experts = attention_spec(config), moe_spec(config, "intermediate_size")
    layers = [LayerSpec(replace(attention, window=window), experts) for window in windows(config, lambda index: True)]
    return model_spec("mixtral", config, layers)


FAMILY = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    from_config=from_config,
    defaults={"rope_theta": 1e6, "rms_norm_eps": 1e-5},
    names=config_names(
        **{
            "router": "block_sparse_moe.gate",
            "experts.{}.gate": "block_sparse_moe.experts.{}.w1",
            "experts.{}.up": "block_sparse_moe.experts.{}.w3",
            "experts.{}.down": "block_sparse_moe.experts.{}.w2",
        }
    ),
)
