"""The one forward pass of every decoder-only model: a `ModelSpec` run by an op set.

Imports no tensor library: tensors are the op set's and opaque here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from octavo.models.blocks.attention import Attention
from octavo.models.blocks.mlp import Mlp
from octavo.models.blocks.moe import Moe
from octavo.models.cache_groups import cache_groups
from octavo.models.spec import LayerSpec, ModelSpec, MoeSpec, RopeSpec
from octavo.models.weights.base import WeightSource
from octavo.ops.base import Batch, OpSet, Tensor


class DecoderLayer:
    """The blocks and norms of one layer; `Decoder` chains them."""

    def __init__(
        self, spec: LayerSpec, model: ModelSpec, ops: OpSet, weights: WeightSource, prefix: str, *, rope: Tensor
    ):
        def norm(name: str, wanted: bool) -> Tensor | None:
            if not wanted:
                return None
            return ops.vector(weights.tensor(f"{prefix}.{name}.weight", (model.hidden_size,)), model.norm_offset)

        self.attention = Attention(spec.attention, model, ops, weights, prefix, rope=rope)
        block = Moe if isinstance(spec.mlp, MoeSpec) else Mlp
        self.mlp: Moe | Mlp = block(spec.mlp, model, ops, weights, prefix)  # type: ignore[arg-type]
        self.attention_norm = norm("attn_norm", spec.pre_norm)
        self.attention_post_norm = norm("attn_post_norm", spec.post_norm)
        self.mlp_norm = norm("mlp_norm", spec.pre_norm)
        self.mlp_post_norm = norm("mlp_post_norm", spec.post_norm)


class Decoder:
    """Embedding, layers, final norm and output head.

    Args:
        spec: the model.
        ops: the device's operations.
        weights: the checkpoint under the decoder's names, e.g. `layers.0.attn_q.weight`.
        max_positions: positions that will be used, at most (the rope tables' length); None: the spec's.

    Raises:
        WeightError: a tensor is missing or has another shape; names the tensor and its file.
    """

    def __init__(self, spec: ModelSpec, ops: OpSet, weights: WeightSource, max_positions: int | None = None):
        self.spec = spec
        self.ops = ops
        self.max_positions = max_positions or spec.max_positions
        """Rows of each rotary table before those of the long frequencies, if there are any."""
        self.cache_groups = cache_groups(spec, self.max_positions)
        self._cache_place = {
            layer: (number, index)
            for number, group in enumerate(self.cache_groups)
            for index, layer in enumerate(group.layers)
        }
        ropes = {rope: self._rope_table(rope) for rope in {layer.attention.rope for layer in spec.layers}}
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

    @property
    def one_of_each_kind(self) -> set[int]:
        """Layers that together do all that any layer does."""
        first: dict[LayerSpec, int] = {}
        for number, layer in enumerate(self.spec.layers):
            first.setdefault(layer, number)
        return set(first.values())

    @property
    def long_rope_above(self) -> int | None:
        """Sequences that may grow beyond so many tokens read the rotary tables' second half; None: no sequence does."""
        above = self.spec.long_rope_above
        return None if above is None or above >= self.max_positions else above

    def _rope_table(self, rope: RopeSpec) -> Tensor:
        variants = [rope.inv_freq]
        if rope.long_inv_freq is not None and self.long_rope_above is not None:
            variants.append(rope.long_inv_freq)
        return self.ops.rope_table(variants, rope.magnitude, self.max_positions)

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> list[Tensor]:
        """Blocks for any cache group: for each layer of a group `[num_blocks, 2, num_kv_heads, block_size, head_dim]`."""
        return [
            self.ops.kv_cache(num_blocks, self._kv_heads(layer), block_size, self._head_dim(layer))
            for layer in self.cache_groups[0].layers
        ]

    def kv_cache_bytes(self, block_size: int) -> int:
        """Bytes of one block of one cache group, over the layers of the group."""
        return sum(
            self.ops.kv_cache_bytes(self._kv_heads(layer), block_size, self._head_dim(layer))
            for layer in self.cache_groups[0].layers
        )

    def _kv_heads(self, layer: int) -> int:
        return self.spec.layers[layer].attention.num_kv_heads

    def _head_dim(self, layer: int) -> int:
        return self.spec.layers[layer].attention.head_dim

    def forward_hidden(
        self, batch: Batch, kv_cache: Sequence[Tensor], *, layers: Collection[int] | None = None
    ) -> Tensor:
        """Run the step: store its keys and values in `kv_cache`, return the normalised hidden states `[n, D]` of
        `batch.logits_indices`. Of some `layers` alone the result means nothing: to load what all of them launch."""
        ops, spec = self.ops, self.spec
        steps = ops.prepare_attention(batch.attention)
        residual = ops.embed(batch.input_ids, self._embedding, spec.embedding_scale)
        # The last block's output, not yet added to the residual: the addition and the next norm are one operation.
        delta: Tensor | None = None
        for number, layer in enumerate(self._layers):
            if layers is not None and number not in layers:
                continue
            group, index = self._cache_place[number]
            x, residual = self._enter(residual, delta, layer.attention_norm)
            attended = layer.attention.forward(x, batch, kv_cache[index], steps[group])
            attended = self._leave(attended, layer.attention_post_norm)
            x, residual = self._enter(residual, attended, layer.mlp_norm)
            delta = self._leave(layer.mlp.forward(x), layer.mlp_post_norm)
        if batch.logits_indices is not None:
            residual = ops.take_rows(residual, batch.logits_indices)
            delta = ops.take_rows(delta, batch.logits_indices)
        hidden, _ = ops.add_rms_norm(residual, delta, spec.residual_scale, self._norm, spec.norm_eps)
        return hidden

    def _enter(self, residual: Tensor, delta: Tensor | None, norm: Tensor | None) -> tuple[Any, Any]:
        """The input of a block, and the residual it is added to."""
        ops, spec = self.ops, self.spec
        if norm is None:
            total = residual if delta is None else ops.add(residual, delta, spec.residual_scale)
            return total, total
        if delta is None:
            return ops.rms_norm(residual, norm, spec.norm_eps), residual
        return ops.add_rms_norm(residual, delta, spec.residual_scale, norm, spec.norm_eps)

    def _leave(self, output: Tensor, norm: Tensor | None) -> Tensor:
        """What a block adds to the residual."""
        return output if norm is None else self.ops.rms_norm(output, norm, self.spec.norm_eps)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Output logits `[n, V]` of hidden states `[n, D]`: in `out`, of the activation dtype, or fp32 and the caller's own."""
        return self.ops.logits(hidden, self._head, self.spec.logit_scale, self.spec.logit_softcap, out)

    def forward(self, batch: Batch, kv_cache: Sequence[Tensor]) -> Tensor:
        """Run the step and return the logits `[n, V]` of `batch.logits_indices`, fp32."""
        return self.logits(self.forward_hidden(batch, kv_cache))
