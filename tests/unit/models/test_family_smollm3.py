"""SmolLM3: some layers do not rotate."""

from __future__ import annotations

from typing import ClassVar

from family_check import CheckFamily, small
from transformers import SmolLM3Config


class TestSmolLM3(CheckFamily):
    variants: ClassVar = {
        "every_fourth": small(SmolLM3Config, num_hidden_layers=5),
        "listed": small(
            SmolLM3Config,
            no_rope_layers=[0, 1, 0],
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=24,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            tie_word_embeddings=True,
        ),
    }
