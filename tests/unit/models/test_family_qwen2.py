"""Qwen2 and 2.5."""

from __future__ import annotations

from typing import ClassVar

from family_check import CheckFamily, small
from transformers import Qwen2Config


class TestQwen2(CheckFamily):
    variants: ClassVar = {
        "plain": small(Qwen2Config),
        "windows": small(
            Qwen2Config, use_sliding_window=True, sliding_window=20, max_window_layers=1, tie_word_embeddings=True
        ),
    }
