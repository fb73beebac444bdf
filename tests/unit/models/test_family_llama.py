"""Llama's rotations are checked in `test_decoder_matches_transformers.py`; here its other switches."""

from __future__ import annotations

from typing import ClassVar

from family_check import CheckFamily, small
from transformers import LlamaConfig


class TestLlama(CheckFamily):
    variants: ClassVar = {
        "llama2": small(LlamaConfig, num_key_value_heads=4),
        "biases": small(LlamaConfig, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    }
