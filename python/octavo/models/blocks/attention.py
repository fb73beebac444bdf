"""Grouped-query attention over the paged KV cache."""

from __future__ import annotations

from typing import Any

from octavo.models.spec import AttentionSpec, ModelSpec
from octavo.models.weights.base import WeightSource
from octavo.ops.base import Batch, OpSet, Tensor


class Attention:
    """`output(attention(rotate(qkv(x))))`. `prefix` is the layer's, e.g. `layers.3`."""

    def __init__(
        self, spec: AttentionSpec, model: ModelSpec, ops: OpSet, weights: WeightSource, prefix: str, *, rope: Tensor
    ):
        self._ops = ops
        self._spec = spec
        self._eps = model.norm_eps
        self._rope = rope
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        sizes = {"attn_q": q_size, "attn_k": kv_size, "attn_v": kv_size}
        self._qkv = ops.linear_weight(
            weights.parts(prefix, "attn_qkv", sizes, model.hidden_size),
            [weights.tensor(f"{prefix}.{name}.bias", (size,)) for name, size in sizes.items()] if spec.qkv_bias else (),
        )
        self._output = ops.linear_weight(
            [weights.tensor(f"{prefix}.attn_output.weight", (model.hidden_size, q_size))],
            [weights.tensor(f"{prefix}.attn_output.bias", (model.hidden_size,))] if spec.output_bias else (),
        )
        self._q_norm = self._k_norm = None
        if spec.qk_norm is not None:
            self._q_norm, self._k_norm = (
                ops.vector(weights.tensor(f"{prefix}.{name}.weight", (size,)), model.norm_offset)
                for name, size in (
                    ("attn_q_norm", spec.head_dim if spec.qk_norm == "head" else q_size),
                    ("attn_k_norm", spec.head_dim if spec.qk_norm == "head" else kv_size),
                )
            )

    def forward(self, x: Tensor, batch: Batch, kv_cache: Tensor, step: Any) -> Tensor:
        """`[T, D]` to `[T, D]`; the keys and values of all rows are stored before any row reads."""
        ops, spec = self._ops, self._spec
        q = ops.rotate_and_store(
            ops.linear(x, self._qkv),
            batch.positions,
            self._rope,
            kv_cache,
            step,
            q_norm=self._q_norm,
            k_norm=self._k_norm,
            eps=self._eps,
            interleaved=spec.rope.interleaved,
        )
        attended = ops.attention(q, kv_cache, step, scale=spec.scale, window=spec.window, softcap=spec.softcap)
        return ops.linear(attended, self._output)
