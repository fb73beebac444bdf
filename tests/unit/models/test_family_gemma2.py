"""Gemma 2: soft caps and windows in every other layer."""

from __future__ import annotations

from typing import ClassVar

from family_check import CheckFamily, small
from transformers import Gemma2Config


class TestGemma2(CheckFamily):
    variants: ClassVar = {
        "plain": small(
            Gemma2Config,
            head_dim=32,
            num_hidden_layers=4,
            sliding_window=20,
            query_pre_attn_scalar=24,
            attn_logit_softcapping=3.0,
            final_logit_softcapping=5.0,
            tie_word_embeddings=True,
        ),
        "no_caps": small(
            Gemma2Config,
            head_dim=16,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            tie_word_embeddings=True,
        ),
    }
