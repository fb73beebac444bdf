"""Mixtral: every token takes two of the experts."""

from __future__ import annotations

from typing import ClassVar

from family_check import CheckFamily, small
from transformers import MixtralConfig


class TestMixtral(CheckFamily):
    variants: ClassVar = {
        "8x7B": small(MixtralConfig, num_local_experts=8, num_experts_per_tok=2, sliding_window=None),
        "one_expert": small(MixtralConfig, num_local_experts=4, num_experts_per_tok=1, sliding_window=40),
    }
