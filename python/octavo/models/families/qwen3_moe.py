"""Qwen3 with experts: 30B-A3B, 235B-A22B and Coder; some layers may be dense."""

from __future__ import annotations

from dataclasses import replace

from octavo.errors import ModelError
from octavo.models.families.base import Family, GgufLayout, config_names, mlp_spec, model_spec, moe_spec
from octavo.models.families.qwen2 import layer_windows
from octavo.models.families.qwen3 import attention_of
from octavo.models.fields import MAX_LAYERS, Config, integer, shown
from octavo.models.spec import LayerSpec, ModelSpec


def from_config(config: Config) -> ModelSpec:
    """A spec of a `config.json`."""
    attention = attention_of(config)
    experts = moe_spec(config, "moe_intermediate_size", normalize_weights=bool(config.get("norm_topk_prob", False)))
    step, dense = integer(config, "decoder_sparse_step", MAX_LAYERS, 1), config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ModelError(f"mlp_only_layers={shown(dense)} must be a list of layers")
    layers = [
        LayerSpec(
            replace(attention, window=window),
            experts if index not in dense and (index + 1) % step == 0 else mlp_spec(config),
        )
        for index, window in enumerate(layer_windows(config))
    ]
    return model_spec("qwen3_moe", config, layers)


FAMILY = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    from_config=from_config,
    names=config_names(
        **{
            "router": "mlp.gate",
            "experts.{}.gate": "mlp.experts.{}.gate_proj",
            "experts.{}.up": "mlp.experts.{}.up_proj",
            "experts.{}.down": "mlp.experts.{}.down_proj",
        }
    ),
    gguf=GgufLayout(("qwen3moe",), defaults={"norm_topk_prob": True}),
)
