"""Granite: four multipliers."""

from __future__ import annotations

from typing import ClassVar

from family_check import CheckFamily, small
from transformers import GraniteConfig


class TestGranite(CheckFamily):
    variants: ClassVar = {
        "plain": small(
            GraniteConfig,
            attention_multiplier=0.3,
            embedding_multiplier=3.0,
            residual_multiplier=0.4,
            logits_scaling=2.5,
        ),
        "biases": small(GraniteConfig, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    }
