"""OLMo 2: norms behind the blocks only, and of all queries and all keys together."""

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
from octavo.models.fields import Config, expect
from octavo.models.spec import LayerSpec, ModelSpec


def from_config(config: Config) -> ModelSpec:
    """A spec of a `config.json`."""
    # GGUF files of OLMo 3, which has windows, call it olmo2 too.
    expect(config, "sliding_window", None)
    bias = bool(config.get("attention_bias", False))
    attention = attention_spec(config, qk_norm="all", qkv_bias=bias, output_bias=bias)
    layer = LayerSpec(attention, mlp_spec(config), pre_norm=False, post_norm=True)
    return model_spec("olmo2", config, (layer,) * num_layers(config))


FAMILY = Family(
    name="olmo2",
    architectures=("Olmo2ForCausalLM",),
    from_config=from_config,
    names=config_names(attn_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm"),
    defaults={"rms_norm_eps": 1e-5},
    gguf=GgufLayout(("olmo2",)),
)
