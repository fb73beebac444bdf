"""Families through GGUF files: logits of transformers' model with the very weights the file holds."""

from __future__ import annotations

import pytest
from family_check import OPS, TOLERANCE, check_shared_prefix, check_whole_and_in_chunks, random_model, small
from gguf_files import TYPES, write_gguf
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from octavo.models.catalog import ModelSource
from octavo.models.loader import load_model, open_model

GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 20, "tie_word_embeddings": True}
MODELS = {
    "llama": ("llama", small(LlamaConfig)),
    "llama_tied_bias": ("llama", small(LlamaConfig, attention_bias=True, tie_word_embeddings=True)),
    "mixtral": ("llama", small(MixtralConfig, num_local_experts=4, sliding_window=None)),
    "qwen2": ("qwen2", small(Qwen2Config)),
    "qwen2_yarn": (
        "qwen2",
        small(
            Qwen2Config,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "attention_factor": 0.7,
            },
        ),
    ),
    "qwen3": ("qwen3", small(Qwen3Config, head_dim=32)),
    "qwen3_moe": (
        "qwen3moe",
        small(
            Qwen3MoeConfig,
            head_dim=16,
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=64,
            norm_topk_prob=True,
        ),
    ),
    "gemma2": ("gemma2", small(Gemma2Config, num_hidden_layers=4, attn_logit_softcapping=3.0, **GEMMA)),
    "gemma3": ("gemma3", small(Gemma3TextConfig, num_hidden_layers=7, **GEMMA)),
    "gemma3_scaled": (
        "gemma3",
        small(
            Gemma3TextConfig,
            num_hidden_layers=6,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 3e3},
            },
            **GEMMA,
        ),
    ),
    "phi3": ("phi3", small(Phi3Config, sliding_window=31)),
    "olmo2": ("olmo2", small(Olmo2Config)),
    "glm4": ("glm4", small(Glm4Config, head_dim=16)),
    "granite": (
        "granite",
        small(
            GraniteConfig,
            attention_multiplier=0.3,
            embedding_multiplier=3.0,
            residual_multiplier=0.4,
            logits_scaling=2.5,
        ),
    ),
}


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("name", MODELS)
def test_a_file_gives_the_logits_of_the_model_it_was_made_of(tmp_path, name, ops):
    architecture, config = MODELS[name]
    path = tmp_path / "model.gguf"
    oracle = write_gguf(path, random_model(config), architecture, ("F32",))
    decoder = load_model(ModelSource("test", path), OPS[ops]()).decoder
    check_whole_and_in_chunks(decoder, oracle, 37, TOLERANCE)
    check_shared_prefix(decoder, oracle, TOLERANCE)


# Rows of 256 elements, one super-block of the K-quants.
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "initializer_range": 0.06}


@pytest.mark.parametrize("kind", TYPES)
def test_each_type_gives_the_logits_of_the_weights_it_stands_for(tmp_path, kind):
    path = tmp_path / "model.gguf"
    oracle = write_gguf(path, random_model(small(Qwen3Config, head_dim=64, **WIDE)), "qwen3", (kind,))
    check_whole_and_in_chunks(load_model(ModelSource("test", path), OPS["reference"]()).decoder, oracle, 90, TOLERANCE)


MIXED = {
    "llama": ("llama", small(LlamaConfig, **WIDE)),
    "qwen2": ("qwen2", small(Qwen2Config, tie_word_embeddings=True, **WIDE)),
    "gemma3": ("gemma3", small(Gemma3TextConfig, **{**WIDE, **GEMMA, "head_dim": 64, "query_pre_attn_scalar": 64})),
    "mixtral": ("llama", small(MixtralConfig, num_local_experts=4, sliding_window=None, **WIDE)),
    "qwen3_moe": (
        "qwen3moe",
        small(
            Qwen3MoeConfig,
            head_dim=64,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=256,
            norm_topk_prob=True,
            **WIDE,
        ),
    ),
}


@pytest.mark.parametrize("types", [("Q4_K", "Q6_K", "Q5_0", "Q8_0", "F16"), ("Q2_K", "Q3_K", "BF16", "Q4_1", "Q5_K")])
@pytest.mark.parametrize("name", MIXED)
def test_types_are_mixed_within_a_file(tmp_path, name, types):
    architecture, config = MIXED[name]
    path = tmp_path / "model.gguf"
    oracle = write_gguf(path, random_model(config), architecture, types)
    opened = open_model(ModelSource("test", path))
    decoder = opened.load(OPS["reference"]()).decoder
    check_whole_and_in_chunks(decoder, oracle, 37, TOLERANCE)
