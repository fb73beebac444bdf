"""Phi-3, Phi-3.5 and Phi-4: Llama with fused weights and LongRoPE."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.families.base import Family, GgufLayout, attention_spec, config_names, mlp_spec, model_spec, windows
from octavo.models.fields import Config
from octavo.models.spec import LayerSpec, ModelSpec


def from_config(config: Config) -> ModelSpec:
    """A spec of a `config.json`."""
    attention, mlp = attention_spec(config), mlp_spec(config)
    layers = [LayerSpec(replace(attention, window=window), mlp) for window in windows(config, lambda index: True)]
    return model_spec("phi3", config, layers)


FAMILY = Family(
    name="phi3",
    architectures=("Phi3ForCausalLM",),
    from_config=from_config,
    names=config_names(attn_qkv="self_attn.qkv_proj", mlp_gate_up="mlp.gate_up_proj"),
    defaults={"rms_norm_eps": 1e-5},
    gguf=GgufLayout(("phi3",), names={"layers.{}.mlp_gate_up.weight": "blk.{}.ffn_up.weight"}),
)
