"""GLM-4 9B (`GlmForCausalLM`) and GLM-4-0414 (`Glm4ForCausalLM`, which adds norms behind the blocks)."""

from __future__ import annotations

from octavo.models.families.base import (
    Family,
    GgufLayout,
    attention_spec,
    config_names,
    mlp_spec,
    model_spec,
    num_layers,
    rope_spec,
)
from octavo.models.fields import Config, expect
from octavo.models.spec import LayerSpec, ModelSpec


def from_config(config: Config) -> ModelSpec:
    """A spec of a `config.json`."""
    attention = attention_spec(
        config, qkv_bias=bool(config.get("attention_bias", False)), rope=rope_spec(config, interleaved=True)
    )
    post_norm = expect(config, "model_type", "glm4", "glm") == "glm4"
    layer = LayerSpec(attention, mlp_spec(config), post_norm=post_norm)
    return model_spec("glm4", config, (layer,) * num_layers(config))


FAMILY = Family(
    name="glm4",
    architectures=("GlmForCausalLM", "Glm4ForCausalLM"),
    from_config=from_config,
    names=config_names(
        attn_post_norm="post_self_attn_layernorm",
        mlp_post_norm="post_mlp_layernorm",
        mlp_gate_up="mlp.gate_up_proj",
    ),
    defaults={"attention_bias": True, "partial_rotary_factor": 0.5, "head_dim": 128, "rms_norm_eps": 1.5625e-7},
    gguf=GgufLayout(
        ("glm4",),
        names={"layers.{}.mlp_gate_up.weight": "blk.{}.ffn_up.weight"},
        defaults={"partial_rotary_factor": 1.0},
    ),
)
