"""Qwen2 and Qwen2.5: Llama with biases of queries, keys and values; the last layers may have a window."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.families.base import Family, GgufLayout, attention_spec, config_names, mlp_spec, model_spec, windows
from octavo.models.fields import MAX_LAYERS, Config, integer
from octavo.models.spec import LayerSpec, ModelSpec


def layer_windows(config: Config) -> list[int | None]:
    """Layers from `max_window_layers` on, if windows are switched on at all."""
    if not config.get("use_sliding_window"):
        config = {**config, "sliding_window": None}
    first = 0 if config.get("max_window_layers") == 0 else integer(config, "max_window_layers", MAX_LAYERS, 28)
    return windows(config, lambda index: index >= first)


def from_config(config: Config) -> ModelSpec:
    """A spec of a `config.json`."""
    attention, mlp = attention_spec(config, qkv_bias=True), mlp_spec(config)
    layers = [LayerSpec(replace(attention, window=window), mlp) for window in layer_windows(config)]
    return model_spec("qwen2", config, layers)


FAMILY = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    from_config=from_config,
    names=config_names(),
    gguf=GgufLayout(("qwen2",)),
)
