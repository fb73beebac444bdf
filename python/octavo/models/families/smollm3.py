"""SmolLM3: Llama without a rotation in every fourth layer."""

from __future__ import annotations

from dataclasses import replace

from octavo.errors import ModelError
from octavo.models.families.base import (
    Family,
    GgufLayout,
    attention_spec,
    config_names,
    mlp_spec,
    model_spec,
    num_layers,
    windows,
)
from octavo.models.fields import MAX_LAYERS, Config, integer, shown
from octavo.models.spec import LayerSpec, ModelSpec


def from_config(config: Config) -> ModelSpec:
    """A spec of a `config.json`."""
    bias = bool(config.get("attention_bias", False))
    plain = attention_spec(config, qkv_bias=bias, output_bias=bias)
    # Frequencies of 0 rotate by nothing.
    still = replace(plain, rope=replace(plain.rope, inv_freq=(0.0,) * len(plain.rope.inv_freq)))
    mlp = mlp_spec(config, bias=bool(config.get("mlp_bias", False)))
    if not config.get("use_sliding_window"):
        config = {**config, "sliding_window": None}
    layers = [
        LayerSpec(replace(plain if rotates else still, window=window), mlp)
        for rotates, window in zip(_rotates(config), windows(config, lambda index: False), strict=True)
    ]
    return model_spec("smollm3", config, layers)


def _rotates(config: Config) -> list[bool]:
    count, given = num_layers(config), config.get("no_rope_layers")
    if given is None:
        interval = integer(config, "no_rope_layer_interval", MAX_LAYERS, 4)
        return [(index + 1) % interval != 0 for index in range(count)]
    if not isinstance(given, list) or len(given) != count:
        raise ModelError(f"no_rope_layers={shown(given)} must have an entry for each of {count} layers")
    return [bool(entry) for entry in given]


FAMILY = Family(
    name="smollm3",
    architectures=("SmolLM3ForCausalLM",),
    from_config=from_config,
    names=config_names(),
    defaults={"rope_theta": 2e6},
    gguf=GgufLayout(("smollm3",), pair_order=True),
)
