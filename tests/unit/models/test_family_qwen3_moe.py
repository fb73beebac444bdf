"""Qwen3 with experts."""

from __future__ import annotations

from typing import ClassVar

from family_check import CheckFamily, small
from transformers import Qwen3MoeConfig


class TestQwen3Moe(CheckFamily):
    variants: ClassVar = {
        "plain": small(
            Qwen3MoeConfig,
            head_dim=16,
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=40,
            norm_topk_prob=True,
        ),
        "some_layers_dense": small(
            Qwen3MoeConfig,
            head_dim=16,
            num_hidden_layers=4,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=40,
            mlp_only_layers=[1],
            decoder_sparse_step=2,
        ),
    }
