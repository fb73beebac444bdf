"""Mistral, with and without a window."""

from __future__ import annotations

from typing import ClassVar

from family_check import CheckFamily, small
from transformers import MistralConfig


class TestMistral(CheckFamily):
    variants: ClassVar = {
        "v0.1": small(MistralConfig, sliding_window=24),
        "v0.3": small(MistralConfig, sliding_window=None, head_dim=32),
    }
