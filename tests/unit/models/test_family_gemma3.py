"""Gemma 3: five window layers to one full one, each kind with its own rotation."""

from __future__ import annotations

from typing import ClassVar

from family_check import CheckFamily, small
from transformers import Gemma3TextConfig


class TestGemma3(CheckFamily):
    variants: ClassVar = {
        "plain": small(
            Gemma3TextConfig,
            head_dim=32,
            num_hidden_layers=7,
            sliding_window=20,
            query_pre_attn_scalar=24,
            tie_word_embeddings=True,
        ),
        "scaled": small(
            Gemma3TextConfig,
            head_dim=16,
            num_hidden_layers=6,
            sliding_window=33,
            tie_word_embeddings=True,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
    }
