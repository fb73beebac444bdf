"""Qwen3."""

from __future__ import annotations

from typing import ClassVar

from family_check import CheckFamily, small
from transformers import Qwen3Config


class TestQwen3(CheckFamily):
    variants: ClassVar = {
        "plain": small(Qwen3Config, head_dim=32),
        "bias": small(Qwen3Config, head_dim=16, attention_bias=True, tie_word_embeddings=True),
    }
