"""Qwen2 and 2.5."""

from __future__ import annotations

from typing import ClassVar

from family_check import CheckFamily, small
from transformers import Qwen2Config

from octavo.models.families import qwen2


def test_yarn_lengthens_the_context_that_the_file_states_without_it():
    """As Qwen2.5's model card tells to extend it."""
    config = {**small(Qwen2Config).to_dict(), "max_position_embeddings": 32768, "rope_parameters": None}
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert qwen2.from_config(config).max_positions == 32768
    assert qwen2.from_config({**config, "rope_scaling": scaling}).max_positions == 131072


class TestQwen2(CheckFamily):
    variants: ClassVar = {
        "plain": small(Qwen2Config),
        "windows": small(
            Qwen2Config, use_sliding_window=True, sliding_window=20, max_window_layers=1, tie_word_embeddings=True
        ),
    }
