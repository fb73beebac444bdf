"""The one forward pass of every decoder-only model: a `ModelSpec` run by an op set.

Imports no tensor library: tensors are the op set's and opaque here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.errors import ModelError
from octavo.models.blocks.attention import Attention
from octavo.models.blocks.mlp import Mlp
from octavo.models.spec import LayerSpec, ModelSpec, MoeSpec
from octavo.models.weights.base import WeightSource
from octavo.ops.base import Batch, OpSet, Tensor


class DecoderLayer:
    """The blocks and norms of one layer; `Decoder` chains them."""

    def __init__(
        self, spec: LayerSpec, model: ModelSpec, ops: OpSet, weights: WeightSource, prefix: str, *, rope: Tensor
    ):
        if isinstance(spec.mlp, MoeSpec):
            raise ModelError(f"{prefix}: mixture-of-experts layers are not supported")
        if not spec.pre_norm or spec.post_norm:
            raise ModelError(f"{prefix}: pre_norm={spec.pre_norm}, post_norm={spec.post_norm} is not supported")
        self.attention = Attention(spec.attention, model, ops, weights, prefix, rope=rope)
        self.mlp = Mlp(spec.mlp, model, ops, weights, prefix)
        shape = (model.hidden_size,)
        self.attention_norm = ops.vector(weights.tensor(f"{prefix}.attn_norm.weight", shape), model.norm_offset)
        self.mlp_norm = ops.vector(weights.tensor(f"{prefix}.mlp_norm.weight", shape), model.norm_offset)


class Decoder:
    """Embedding, layers, final norm and output head.

    Args:
        spec: the model.
        ops: the device's operations.
        weights: the checkpoint under the decoder's names, e.g. `layers.0.attn_q.weight`.
        max_positions: positions that will be used, at most (the rope tables' length); None: the spec's.

    Raises:
        ModelError: a field of the spec that no block implements.
        WeightError: a tensor is missing or has another shape; names the tensor and its file.
    """

    def __init__(self, spec: ModelSpec, ops: OpSet, weights: WeightSource, max_positions: int | None = None):
        self.spec = spec
        self.ops = ops
        ropes = {
            rope: ops.rope_table(rope.inv_freq, rope.magnitude, max_positions or spec.max_positions)
            for rope in {layer.attention.rope for layer in spec.layers}
        }
        table_shape = (spec.vocab_size, spec.hidden_size)
        self._embedding, head = ops.embedding_weight(
            weights.tensor("embedding.weight", table_shape), spec.tied_embeddings
        )
        self._layers = [
            DecoderLayer(layer, spec, ops, weights, f"layers.{index}", rope=ropes[layer.attention.rope])
            for index, layer in enumerate(spec.layers)
        ]
        self._norm = ops.vector(weights.tensor("norm.weight", (spec.hidden_size,)), spec.norm_offset)
        self._head = ops.linear_weight([weights.tensor("head.weight", table_shape)]) if head is None else head

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> list[Tensor]:
        """The cache of each layer, `[num_blocks, 2, num_kv_heads, block_size, head_dim]`."""
        return [
            self.ops.kv_cache(num_blocks, layer.attention.num_kv_heads, block_size, layer.attention.head_dim)
            for layer in self.spec.layers
        ]

    def kv_cache_bytes(self, block_size: int) -> int:
        """Bytes of one block over all layers."""
        return sum(
            self.ops.kv_cache_bytes(layer.attention.num_kv_heads, block_size, layer.attention.head_dim)
            for layer in self.spec.layers
        )

    def forward_hidden(self, batch: Batch, kv_cache: Sequence[Tensor]) -> Tensor:
        """Run the step: store its keys and values in `kv_cache`, return the normalised hidden states `[n, D]` of
        `batch.logits_indices`."""
        ops, spec = self.ops, self.spec
        step: Any = ops.prepare_attention(batch.attention)
        residual = ops.embed(batch.input_ids, self._embedding, spec.embedding_scale)
        scale, eps = spec.residual_scale, spec.norm_eps
        # The last block's output, not yet added to the residual: the addition and the next norm are one operation.
        delta: Tensor | None = None
        for layer, cache in zip(self._layers, kv_cache, strict=True):
            if delta is None:
                x = ops.rms_norm(residual, layer.attention_norm, eps)
            else:
                x, residual = ops.add_rms_norm(residual, delta, scale, layer.attention_norm, eps)
            attended = layer.attention.forward(x, batch, cache, step)
            x, residual = ops.add_rms_norm(residual, attended, scale, layer.mlp_norm, eps)
            delta = layer.mlp.forward(x)
        residual = ops.take_rows(residual, batch.logits_indices)
        hidden, _ = ops.add_rms_norm(residual, ops.take_rows(delta, batch.logits_indices), scale, self._norm, eps)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Output logits of hidden states `[n, D]`: fp32 `[n, V]`, the caller's own."""
        return self.ops.logits(hidden, self._head, self.spec.logit_scale, self.spec.logit_softcap)

    def forward(self, batch: Batch, kv_cache: Sequence[Tensor]) -> Tensor:
        """Run the step and return the logits `[n, V]` of `batch.logits_indices`, fp32."""
        return self.logits(self.forward_hidden(batch, kv_cache))
