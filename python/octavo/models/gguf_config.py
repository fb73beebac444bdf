"""GGUF metadata as the fields of a `config.json`, so that each family is described once.

Keys and their meaning: the GGUF specification of ggml, and llama.cpp's `convert_hf_to_gguf.py` for the fields of each
architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.errors import ModelError
from octavo.models.fields import Config, expect, integer, shown
from octavo.ops.base import StoredTensor

_FIELDS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
    "norm_topk_prob": "expert_weights_norm",
    "rope_theta": "rope.freq_base",
    "rope_local_base_freq": "rope.freq_base_swa",
}
"""Field of a `config.json`: key of the metadata, without the architecture before it."""
_FIXED: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "expert_gating_func": (0, 1),
    "expert_group_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "rope.dimension_sections": (None,),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
"""Keys that would change the computation, and the values that do not; expert gates 0 and 1 are the default and softmax."""
_FACTORS = {
    "factors": "rope_freqs.weight",
    "short_factor": "rope_factors_short.weight",
    "long_factor": "rope_factors_long.weight",
}
ROPE_TENSORS = tuple(_FACTORS.values())
"""Tensors that belong to the configuration."""
_EMBEDDING = "token_embd.weight"


def config_from_gguf(metadata: Config, tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """The fields that the metadata and the tensors' names and shapes tell.

    Raises:
        ModelError: the embedding is missing, or the file says something that has no field.
    """
    architecture = metadata["general.architecture"]

    def value(key: str, default: Any = None) -> Any:
        return metadata.get(f"{architecture}.{key}", default)

    if _EMBEDDING not in tensors:
        raise ModelError(f"tensor {_EMBEDDING} is missing")
    for key, allowed in _FIXED.items():
        if value(key) is not None:
            expect(metadata, f"{architecture}.{key}", *allowed)
    config = {field: value(key) for field, key in _FIELDS.items() if value(key) is not None}
    for field in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if field in config:
            config[field] = _same_in_all_layers(_FIELDS[field], config[field])
    heads, hidden, size = (config.get(name) for name in ("num_attention_heads", "hidden_size", "head_dim"))
    if size is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        size = hidden // heads
    value_size = value("attention.value_length", size)
    if value_size != size:
        raise ModelError(
            f"{architecture}.attention.value_length={shown(value_size)} must be {shown(size)}, the keys' length"
        )
    if config.get("sliding_window") == 0:
        config["sliding_window"] = None
    pattern = value("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        config["layer_types"] = ["sliding_attention" if local else "full_attention" for local in pattern]
    elif pattern is not None:
        config["sliding_window_pattern"] = pattern
    if isinstance(size, int) and size > 0 and value("rope.dimension_count", size) != size:
        config["partial_rotary_factor"] = integer(metadata, f"{architecture}.rope.dimension_count", size) / size
    config["rope_parameters"] = _rope(architecture, value, tensors)
    config["vocab_size"] = tensors[_EMBEDDING].shape[0]
    config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    config["attention_output_bias"] = "blk.0.attn_output.bias" in tensors
    config["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    config["eos_token_id"] = metadata.get("tokenizer.ggml.eos_token_id")
    return config


def _rope(architecture: str, value: Any, tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """`rope_parameters` of the scaling keys and of the tensors of factors."""
    factors = {name: tensors[tensor].float32().tolist() for name, tensor in _FACTORS.items() if tensor in tensors}
    scaling = value("rope.scaling.type", "none")
    if "factors" in factors:
        return {"rope_type": "factors", **factors}
    if factors or scaling == "longrope":
        original = value("rope.scaling.original_context_length")
        return {
            "rope_type": "longrope",
            **factors,
            **({} if original is None else {"original_max_position_embeddings": original}),
            "attention_factor": value("rope.scaling.attn_factor"),
        }
    if scaling not in ("none", "linear", "yarn"):
        raise ModelError(
            f"{architecture}.rope.scaling.type={shown(scaling)} is not supported; supported: 'none', 'linear', 'longrope', 'yarn'"
        )
    factor = value("rope.scaling.factor", value("rope.scale_linear", 1.0))
    if scaling == "yarn":
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": value("rope.scaling.original_context_length"),
            "attention_factor": value("rope.scaling.yarn_attn_factor"),
            "beta_fast": value("rope.scaling.yarn_beta_fast"),
            "beta_slow": value("rope.scaling.yarn_beta_slow"),
        }
    # Files without a scaling type may have a factor for linear scaling all the same.
    return {"rope_type": "linear", "factor": factor}


def _same_in_all_layers(key: str, value: Any) -> Any:
    """A value, or the one value of a list with an entry for each layer."""
    if not isinstance(value, list):
        return value
    if not value or any(one != value[0] for one in value):
        raise ModelError(f"{key} differs between layers, which is not supported")
    return value[0]
