"""Gemma 3, and the text part of its multimodal checkpoints: windows in five of six layers, with a rotation of their own."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.families.base import Family, GgufLayout, layer_types, rope_spec, windows
from octavo.models.families.gemma2 import NAMES, attention_of, model_of, score_scalar
from octavo.models.fields import MAX_LAYERS, Config, integer, mapping, number
from octavo.models.spec import ModelSpec, RopeSpec


def from_config(config: Config) -> ModelSpec:
    """A spec of a `config.json`."""
    pattern = integer(config, "sliding_window_pattern", MAX_LAYERS, config.get("_sliding_window_pattern") or 6)
    whole = attention_of(config, qk_norm="head", rope=rope_spec(config, "full_attention"))
    local = attention_of(config, qk_norm="head", rope=_local_rope(config))

    def is_local(index: int) -> bool:
        return (index + 1) % pattern != 0

    attentions = [
        replace(local if kind == "sliding_attention" else whole, window=window)
        for kind, window in zip(layer_types(config, is_local), windows(config, is_local), strict=True)
    ]
    return model_of("gemma3", config, attentions)


def _local_rope(config: Config) -> RopeSpec:
    """The window layers' rotation: their own parameters, in older files `rope_local_base_freq` without scaling."""
    own = mapping(mapping(config, "rope_parameters"), "sliding_attention")
    plain = {"rope_theta": number(config, "rope_local_base_freq", 10000.0)}
    return rope_spec({**config, "rope_parameters": plain | dict(own), "rope_scaling": None})


FAMILY = Family(
    name="gemma3",
    architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    from_config=from_config,
    names=NAMES,
    defaults={
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "rope_theta": 1e6,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "eos_token_id": 1,
    },
    gguf=GgufLayout(("gemma3",), derive=lambda config: score_scalar(config, 62)),
    prefixes={
        "language_model.model.": "model.",
        "model.language_model.": "model.",
        "language_model.lm_head.": "lm_head.",
    },
    ignored=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
)
