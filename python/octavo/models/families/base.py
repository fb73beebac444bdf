"""What a family's file provides, and what it is built from: readers of configuration fields, parts of specs, tensor names.

A family is described once, in the fields of its `config.json`; `models/gguf_config.py` turns GGUF metadata into the same
fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from octavo.errors import ModelError
from octavo.models.fields import (
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
    MAX_WIDTH,
    Config,
    expect,
    integer,
    mapping,
    number,
    shown,
    token_ids,
)
from octavo.models.rope import rope_from_config, rope_kind
from octavo.models.spec import Activation, AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec, RopeSpec

_ACTIVATIONS: Final[dict[str, Activation]] = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
}


@dataclass(frozen=True, slots=True)
class GgufLayout:
    """How a family's GGUF files differ from its safetensors."""

    architectures: tuple[str, ...]
    """Values of `general.architecture`."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names that differ from `GGUF_NAMES`."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `config.json` that the metadata leave out."""
    derive: Callable[[Config], Mapping[str, Any]] = lambda config: {}
    """Further fields that follow from those read."""
    pair_order: bool = False
    """Query and key rows are stored pair by pair, `(0, d/2, 1, d/2 + 1, …)`."""


@dataclass(frozen=True, slots=True)
class Family:
    """How an architecture's checkpoints become a `ModelSpec` and the decoder's tensor names."""

    name: str
    architectures: tuple[str, ...]
    """Names in `architectures` of a `config.json`."""
    from_config: Callable[[Config], ModelSpec]
    names: Mapping[str, str]
    """From the decoder's names to the file's, `{}` being a layer's or an expert's number."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields that a `config.json` may leave out."""
    gguf: GgufLayout | None = None
    prefixes: Mapping[str, str] = field(default_factory=dict)
    """Beginnings of tensor names to replace, where a checkpoint wraps the decoder."""
    ignored: tuple[str, ...] = ()
    """Beginnings of names of tensors that belong to other parts of the checkpoint, such as a vision tower."""


# -- tensor names ------------------------------------------------------------------------------------------------------


def names(of_layer: Mapping[str, str], of_model: Mapping[str, str], layer_prefix: str) -> dict[str, str]:
    """A name map, weights and biases, from short names within a layer and of the model."""
    return dict(of_model) | {
        f"layers.{{}}.{ours}.{kind}": f"{layer_prefix}.{{}}.{theirs}.{kind}"
        for ours, theirs in of_layer.items()
        for kind in ("weight", "bias")
    }


def config_names(**of_layer: str) -> dict[str, str]:
    """The names most safetensors use, with `of_layer` instead of or beside them."""
    usual = {
        "attn_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "mlp_gate": "mlp.gate_proj",
        "mlp_up": "mlp.up_proj",
        "mlp_down": "mlp.down_proj",
    }
    of_model = {
        "embedding.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    }
    return names(usual | of_layer, of_model, "model.layers")


GGUF_NAMES = names(
    {
        "attn_norm": "attn_norm",
        "attn_post_norm": "post_attention_norm",
        "mlp_norm": "ffn_norm",
        "mlp_post_norm": "post_ffw_norm",
        "attn_q": "attn_q",
        "attn_k": "attn_k",
        "attn_v": "attn_v",
        "attn_qkv": "attn_qkv",
        "attn_output": "attn_output",
        "attn_q_norm": "attn_q_norm",
        "attn_k_norm": "attn_k_norm",
        "mlp_gate": "ffn_gate",
        "mlp_up": "ffn_up",
        "mlp_down": "ffn_down",
        "router": "ffn_gate_inp",
        "experts.gate": "ffn_gate_exps",
        "experts.up": "ffn_up_exps",
        "experts.down": "ffn_down_exps",
        "experts.{}.gate": "ffn_gate.{}",
        "experts.{}.up": "ffn_up.{}",
        "experts.{}.down": "ffn_down.{}",
    },
    {"embedding.weight": "token_embd.weight", "norm.weight": "output_norm.weight", "head.weight": "output.weight"},
    "blk",
)
"""The names of GGUF files."""


# -- parts of specs ----------------------------------------------------------------------------------------------------


def rope_spec(config: Config, layer_type: str | None = None, interleaved: bool = False) -> RopeSpec:
    """The rotation of `rope_parameters` or `rope_scaling`; of one layer type where these differ by it."""
    parameters = _rope_parameters(config, layer_type)
    outside = {
        key: config[key]
        for key in ("partial_rotary_factor", "original_max_position_embeddings")
        if config.get(key) is not None
    }
    length = integer(config, "max_position_embeddings", MAX_POSITIONS)
    return rope_from_config(
        outside | dict(parameters), head_dim(config), length, number(config, "rope_theta", 10000.0), interleaved
    )


def _rope_parameters(config: Config, layer_type: str | None) -> Config:
    """The object of newer files, `rope_parameters`, or of older ones, `rope_scaling`."""
    parameters, scaling = mapping(config, "rope_parameters"), mapping(config, "rope_scaling")
    if layer_type is not None and layer_type in parameters:
        parameters = mapping(parameters, layer_type)
    if nested := [key for key, value in parameters.items() if isinstance(value, Mapping)]:
        raise ModelError(f"rope_parameters has an object {shown(nested[0])}; one rotation for all layers is supported")
    if parameters and scaling and not scaling.items() <= parameters.items():
        raise ModelError(
            f"rope_scaling={shown(scaling)} contradicts rope_parameters={shown(parameters)}; keep one of them"
        )
    return parameters or scaling


def context_length(config: Config) -> int:
    """`max_position_embeddings`, or what YaRN reaches: the files of Qwen keep the length before scaling there."""
    length = integer(config, "max_position_embeddings", MAX_POSITIONS)
    parameters = _rope_parameters(config, "full_attention")
    if rope_kind(parameters) != "yarn":
        return length
    reached = number(parameters, "original_max_position_embeddings", length) * number(parameters, "factor")
    return max(length, min(MAX_POSITIONS, int(reached)))


def head_dim(config: Config) -> int:
    """`head_dim`, or what the hidden size leaves for each head."""
    heads = integer(config, "num_attention_heads", MAX_HEADS)
    return integer(config, "head_dim", MAX_HEAD_DIM, integer(config, "hidden_size", MAX_WIDTH) // heads)


def attention_spec(config: Config, **changes: Any) -> AttentionSpec:
    """Attention as most configurations describe it, with `changes`."""
    heads, size = integer(config, "num_attention_heads", MAX_HEADS), head_dim(config)
    fields: dict[str, Any] = {
        "num_heads": heads,
        "num_kv_heads": integer(config, "num_key_value_heads", heads, heads),
        "head_dim": size,
        "scale": size**-0.5,
    } | changes
    if "rope" not in fields:
        fields["rope"] = rope_spec(config)
    return AttentionSpec(**fields)


def mlp_spec(config: Config, **changes: Any) -> MlpSpec:
    """The feed-forward block of `intermediate_size`."""
    size = integer(config, "intermediate_size", MAX_WIDTH)
    return MlpSpec(**{"intermediate_size": size, "activation": activation(config)} | changes)


def moe_spec(config: Config, size: str, **changes: Any) -> MoeSpec:
    """The experts, whose size is the field `size`."""
    experts = integer(config, "num_local_experts" if "num_local_experts" in config else "num_experts", MAX_EXPERTS)
    fields: dict[str, Any] = {
        "num_experts": experts,
        "num_experts_per_token": integer(config, "num_experts_per_tok", experts),
        "expert_intermediate_size": integer(config, size, MAX_WIDTH),
        "activation": activation(config),
    }
    return MoeSpec(**fields | changes)


def activation(config: Config) -> Activation:
    """`hidden_activation` or `hidden_act`."""
    key = "hidden_activation" if config.get("hidden_activation") else "hidden_act"
    return _ACTIVATIONS[expect(config, key, *_ACTIVATIONS)]


def num_layers(config: Config) -> int:
    """`num_hidden_layers`."""
    return integer(config, "num_hidden_layers", MAX_LAYERS)


def layer_types(config: Config, otherwise: Callable[[int], bool]) -> list[str]:
    """Of each layer `sliding_attention` or `full_attention`: `layer_types`, or by whether `otherwise(index)` holds."""
    count, types = num_layers(config), config.get("layer_types")
    if types is None:
        types = ["sliding_attention" if otherwise(index) else "full_attention" for index in range(count)]
    if not isinstance(types, list) or len(types) != count:
        raise ModelError(f"layer_types={shown(types)} must have an entry for each of {count} layers")
    for kind in types:
        if kind not in ("sliding_attention", "full_attention"):
            raise ModelError(f"layer_types has {shown(kind)}; supported: 'full_attention', 'sliding_attention'")
    return types


def windows(config: Config, otherwise: Callable[[int], bool]) -> list[int | None]:
    """The window of each layer by its type, see `layer_types`; all None without a `sliding_window`."""
    types = layer_types(config, otherwise)
    window = None if config.get("sliding_window") is None else integer(config, "sliding_window", MAX_POSITIONS)
    return [window if kind == "sliding_attention" else None for kind in types]


def model_spec(family: str, config: Config, layers: Sequence[LayerSpec], **changes: Any) -> ModelSpec:
    """A model of `layers`, the rest as most configurations describe it, with `changes`."""
    fields: dict[str, Any] = {
        "vocab_size": integer(config, "vocab_size", MAX_VOCAB),
        "hidden_size": integer(config, "hidden_size", MAX_WIDTH),
        "max_positions": context_length(config),
        "norm_eps": number(config, "rms_norm_eps", 1e-6),
        "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
        "eos_token_ids": token_ids(config.get("eos_token_id")),
    }
    return ModelSpec(family, layers=tuple(layers), **fields | changes)
