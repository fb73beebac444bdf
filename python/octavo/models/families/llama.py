"""Llama and what shares its shape: Llama 1-3, SmolLM2, TinyLlama and the like."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from octavo.models.families.base import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
    MAX_WIDTH,
    Config,
    Family,
    expect,
    integer,
    need,
    number,
    token_ids,
)
from octavo.models.rope import rope_from_config
from octavo.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec
from octavo.models.weights.base import PermutedTensor
from octavo.ops.base import StoredTensor


def from_config(config: Config) -> ModelSpec:
    """A spec of a `config.json`."""
    expect(config, "hidden_act", "silu")
    heads = integer(config, "num_attention_heads", MAX_HEADS)
    hidden = integer(config, "hidden_size", MAX_WIDTH)
    length = integer(config, "max_position_embeddings", MAX_POSITIONS)
    head_dim = integer(config, "head_dim", MAX_HEAD_DIM, hidden // heads)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    bias = bool(config.get("attention_bias", False))
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=integer(config, "num_key_value_heads", heads, heads),
        head_dim=head_dim,
        rope=rope_from_config(rope, head_dim, length, number(config, "rope_theta", 10000.0)),
        scale=head_dim**-0.5,
        qkv_bias=bias,
        output_bias=bias,
    )
    mlp = MlpSpec(integer(config, "intermediate_size", MAX_WIDTH), bias=bool(config.get("mlp_bias", False)))
    return ModelSpec(
        family="llama",
        vocab_size=integer(config, "vocab_size", MAX_VOCAB),
        hidden_size=hidden,
        layers=(LayerSpec(attention, mlp),) * integer(config, "num_hidden_layers", MAX_LAYERS),
        max_positions=length,
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=token_ids(config.get("eos_token_id")),
    )


def from_gguf(metadata: Config) -> ModelSpec:
    """A spec of GGUF metadata; `vocab_size` and `rope_factors` are added by the loader from the file's tensors."""

    def value(key: str, high: int, default: int | None = None) -> int:
        return integer(metadata, f"llama.{key}", high, default)

    expect(metadata, "llama.rope.scaling.type", "none", "linear")
    heads, hidden = value("attention.head_count", MAX_HEADS), value("embedding_length", MAX_WIDTH)
    length = value("context_length", MAX_POSITIONS)
    head_dim = value("attention.key_length", MAX_HEAD_DIM, hidden // heads)
    rotary_dim = value("rope.dimension_count", head_dim, head_dim)
    scaling = number(metadata, "llama.rope.scaling.factor", 1.0)
    base = number(metadata, "llama.rope.freq_base", 10000.0)
    factors = metadata.get("rope_factors") or [1.0] * (rotary_dim // 2)
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=value("attention.head_count_kv", heads, heads),
        head_dim=head_dim,
        rope=RopeSpec(tuple(base ** (-2 * i / rotary_dim) / (scaling * f) for i, f in enumerate(factors))),
        scale=head_dim**-0.5,
    )
    eos = metadata.get("tokenizer.ggml.eos_token_id")
    return ModelSpec(
        family="llama",
        vocab_size=need(metadata, "vocab_size"),
        hidden_size=hidden,
        layers=(LayerSpec(attention, MlpSpec(value("feed_forward_length", MAX_WIDTH))),)
        * value("block_count", MAX_LAYERS),
        max_positions=length,
        norm_eps=number(metadata, "llama.attention.layer_norm_rms_epsilon"),
        tied_embeddings=False,
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=token_ids(eos),
    )


def undo_pair_order(spec: ModelSpec) -> Callable[[str, StoredTensor], StoredTensor]:
    """GGUF files of this family store query and key rows pair by pair, `(0, d/2, 1, d/2 + 1, …)`; back to halves."""

    def adapt(name: str, tensor: StoredTensor) -> StoredTensor:
        if not name.endswith((".attn_q.weight", ".attn_k.weight")):
            return tensor
        head_dim = spec.layers[0].attention.head_dim
        order = np.arange(tensor.shape[0]).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
        return PermutedTensor(tensor, order)

    return adapt


_BLOCK = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_ATTENTION = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"}
_MLP = {"mlp_gate": "gate_proj", "mlp_up": "up_proj", "mlp_down": "down_proj"}
_GGUF = {"mlp_norm": "ffn_norm", "mlp_gate": "ffn_gate", "mlp_up": "ffn_up", "mlp_down": "ffn_down"}

FAMILY = Family(
    name="llama",
    from_config=from_config,
    config_names={
        "embedding.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    }
    | {
        f"layers.{{}}.{ours}.{kind}": f"model.layers.{{}}.{theirs}.{kind}"
        for ours, theirs in (
            list(_BLOCK.items())
            + [(ours, f"self_attn.{theirs}") for ours, theirs in _ATTENTION.items()]
            + [(ours, f"mlp.{theirs}") for ours, theirs in _MLP.items()]
        )
        for kind in ("weight", "bias")
    },
    from_gguf=from_gguf,
    gguf_names={
        "embedding.weight": "token_embd.weight",
        "norm.weight": "output_norm.weight",
        "head.weight": "output.weight",
    }
    | {
        f"layers.{{}}.{ours}.{kind}": f"blk.{{}}.{_GGUF.get(ours, ours)}.{kind}"
        for ours in (*_BLOCK, *_ATTENTION, *_MLP)
        for kind in ("weight", "bias")
    },
    gguf_adapt=undo_pair_order,
)
