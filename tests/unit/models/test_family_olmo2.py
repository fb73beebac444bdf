"""OLMo 2: norms behind the blocks."""

from __future__ import annotations

from typing import ClassVar

from family_check import CheckFamily, small
from transformers import Olmo2Config


class TestOlmo2(CheckFamily):
    variants: ClassVar = {
        "plain": small(Olmo2Config),
        "multi_head": small(Olmo2Config, num_key_value_heads=4, attention_bias=True),
    }
