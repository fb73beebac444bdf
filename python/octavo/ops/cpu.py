"""Torch on the CPU, for speed: few operations per layer, no Python loop over tokens or requests.

Decode is bound by reading weights, so 4-bit weights stay 4-bit for steps of few tokens (torch's int4 kernel, bf16 scales);
larger steps use a dense copy in the type whose matrix product this machine does fastest. Activations are fp32, the KV cache is
bf16. Attention gathers each row's blocks and runs over rows in bulk, in groups of similar query and sequence lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from octavo.ops.base import Activation, AttentionMetadata, StoredTensor
from octavo.ops.host import lazy_zeros, read_bias, read_matrix, read_vector, rope_angles

_CPU = torch.device("cpu")
_GROUP = 32
_PACKED_ROWS = 48
"""Steps of at most this many tokens use the packed weights; above, the dense product is faster (measured, AVX2, 2 threads)."""


@dataclass(slots=True)
class LinearWeight:
    """One weight in up to two forms; at least one is there."""

    dense: Tensor | None
    """`[in, out]`, a transposed view, bf16 or fp32."""
    int4: tuple[Tensor, Tensor] | None
    """Packed codes, and scale and zero `[in / 32, out, 2]` in bf16: `w = (code - 8) * scale + zero`."""
    int8: tuple[Tensor, Tensor] | None
    """Codes `[out, in]` and bf16 scales `[out]`."""
    bias: Tensor | None


@dataclass(slots=True)
class Embedding:
    """A table `[V, D]`: dense, or int8 codes with a scale for each 32 elements of a row."""

    table: Tensor
    scales: Tensor | None


@dataclass(slots=True)
class RowGroup:
    """Rows of similar lengths, padded to `Q` queries and `L` positions; `n` rows."""

    token: Tensor
    """`[n * Q]` the step's token of each place; places past a row's end repeat its last token."""
    place: Tensor
    """`[m]` the places that are real, and"""
    target: Tensor
    """`[m]` the tokens they are."""
    position: Tensor
    """`[n, Q]` positions of the queries."""
    blocks: Tensor
    """`[n * L / B]` block ids."""
    num_rows: int
    num_positions: int
    masks: dict[int | None, Tensor] = field(default_factory=dict)
    """Per window, 0 where a query sees a position and -inf elsewhere: `[n, 1, Q, L]`."""


@dataclass(slots=True)
class AttentionStep:
    """The groups of a step, and where its keys and values go."""

    groups: list[RowGroup]
    block: Tensor
    offset: Tensor


class CpuOps:
    """The op set of torch on the CPU.

    Args:
        dtype: None: 4-bit and 8-bit weights stay packed and the cache is bf16. Given: all weights and the cache are of this type.
    """

    name = "cpu"

    def __init__(self, dtype: torch.dtype | None = None):
        fast_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        self.device = _CPU
        self.dense_dtype = dtype or (torch.bfloat16 if fast_bf16 else torch.float32)
        self.cache_dtype = dtype or torch.bfloat16
        self._packed = dtype is None

    # -- weights ---------------------------------------------------------------------------------------------------

    def vector(self, source: StoredTensor, offset: float = 0.0) -> Tensor:
        """The vector plus `offset`, fp32."""
        return read_vector(source, _CPU, torch.float32, offset)

    def linear_weight(self, parts: Sequence[StoredTensor], biases: Sequence[StoredTensor] = ()) -> LinearWeight:
        """`parts` stacked along `out`: dense, and packed if all are 4-bit."""
        packs = self._packed and all(part.storage in ("Q4_0", "Q4_1") and part.shape[0] % 64 == 0 for part in parts)
        int4 = _pack_int4(parts) if packs else None
        dense = read_matrix(parts, _CPU, self.dense_dtype).t()
        return LinearWeight(dense, int4, None, read_bias(biases, _CPU, torch.float32))

    def embedding_weight(self, source: StoredTensor, tied: bool) -> tuple[Embedding, LinearWeight | None]:
        """8-bit tables stay 8-bit; as a head they get one scale per row (torch's int8 kernel)."""
        if source.storage != "Q8_0" or not self._packed:
            table = read_matrix([source], _CPU, self.dense_dtype)
            return Embedding(table, None), LinearWeight(table.t(), None, None, None) if tied else None
        blocks = source.rows(0, source.shape[0]).reshape(source.shape[0], -1, 34)
        scales = torch.from_numpy(np.ascontiguousarray(blocks[:, :, :2]).view(np.float16).astype(np.float32))
        codes = torch.from_numpy(blocks[:, :, 2:].view(np.int8).reshape(source.shape))
        source.release()
        embedding = Embedding(codes, scales.squeeze(-1))
        return embedding, LinearWeight(None, None, _per_row_int8(embedding), None) if tied else None

    def rope_table(self, inv_freq: Sequence[float], magnitude: float, max_positions: int) -> Tensor:
        """`[2, max_positions, 1, rotary_dim]`: cosines, and sines whose first half is negated."""
        cos, sin = rope_angles(inv_freq, magnitude, max_positions)
        return torch.stack([torch.cat([cos, cos], 1), torch.cat([-sin, sin], 1)]).unsqueeze(2)

    def kv_cache(self, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int) -> Tensor:
        """Zeros, bf16."""
        return lazy_zeros((num_blocks, 2, num_kv_heads, block_size, head_dim), self.device, self.cache_dtype)

    def kv_cache_bytes(self, num_kv_heads: int, block_size: int, head_dim: int) -> int:
        """Bytes of one block of one layer."""
        return 2 * num_kv_heads * block_size * head_dim * self.cache_dtype.itemsize

    # -- a step ----------------------------------------------------------------------------------------------------

    def prepare_attention(self, metadata: AttentionMetadata) -> AttentionStep:
        """Group the rows so that padding at most doubles the queries and quadruples the positions of a row."""
        starts, seq_lens = metadata.query_start_loc.numpy(), metadata.seq_lens.numpy().astype(np.int64)
        query_lens = np.diff(starts)
        rows = np.flatnonzero(query_lens)
        # Powers of 2 of the query length, of 4 of the sequence length.
        keys = np.ceil(np.log2(query_lens[rows])) * 64 + np.ceil(np.log2(seq_lens[rows]) / 2)
        slots = metadata.slot_mapping.long()
        return AttentionStep(
            groups=[_row_group(metadata, rows[keys == key], starts, seq_lens) for key in np.unique(keys)],
            block=slots // metadata.block_size,
            offset=slots % metadata.block_size,
        )

    def embed(self, ids: Tensor, table: Embedding, scale: float) -> Tensor:
        """`table[ids] * scale`, fp32."""
        rows = table.table[ids.long()].float()
        if table.scales is not None:
            rows = (rows.unflatten(1, (-1, _GROUP)) * table.scales[ids.long()].unsqueeze(-1)).flatten(1)
        return rows.mul_(scale)

    def linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """`x @ weight.T + bias`, fp32 in and out."""
        if weight.int4 is not None and (x.shape[0] <= _PACKED_ROWS or weight.dense is None):
            out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
                x.bfloat16(), weight.int4[0], _GROUP, weight.int4[1]
            ).float()
        elif weight.int8 is not None:
            out = torch.ops.aten._weight_int8pack_mm(x.bfloat16(), *weight.int8).float()
        else:
            assert weight.dense is not None
            out = torch.mm(x.to(weight.dense.dtype), weight.dense).float()
        return out if weight.bias is None else out.add_(weight.bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x / sqrt(mean(x²) + eps) * weight`."""
        normed: Tensor = functional.rms_norm(x, (x.shape[-1],), weight, eps)
        return normed

    def residual_add(self, residual: Tensor, x: Tensor, scale: float) -> Tensor:
        """`residual + scale * x`, in `residual`'s memory."""
        return residual.add_(x, alpha=scale)

    def add_rms_norm(
        self, residual: Tensor, x: Tensor, scale: float, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """The norm of `residual + scale * x`, and that sum in `residual`'s memory."""
        residual.add_(x, alpha=scale)
        return self.rms_norm(residual, weight, eps), residual

    def rotate_and_store(
        self,
        qkv: Tensor,
        positions: Tensor,
        rope: Tensor,
        kv_cache: Tensor,
        step: Any,
        *,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        interleaved: bool,
    ) -> Tensor:
        """Split, normalise, rotate queries and keys together, store; see `OpSet`."""
        plan: AttentionStep = step
        kv_heads, head_dim = kv_cache.shape[2], kv_cache.shape[4]
        heads = qkv.view(qkv.shape[0], -1, head_dim)
        turned = heads[:, :-kv_heads]
        if q_norm is not None and k_norm is not None:
            norms = (turned[:, :-kv_heads], q_norm), (turned[:, -kv_heads:], k_norm)
            turned = torch.cat([self.rms_norm(part, norm, eps) for part, norm in norms], dim=1)
        turned = _rotate(turned, rope[:, positions], interleaved)
        pair = torch.stack([turned[:, -kv_heads:], heads[:, -kv_heads:]], dim=1).to(self.cache_dtype)
        # Finite, so that a later owner of the block can multiply what it does not see by 0.
        kv_cache[plan.block, :, :, plan.offset] = pair.nan_to_num_()
        return turned[:, :-kv_heads]

    def attention(
        self, q: Tensor, kv_cache: Tensor, step: Any, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Attention of each group in bulk; see `OpSet`."""
        plan: AttentionStep = step
        if len(plan.groups) == 1 and len(plan.groups[0].place) == q.shape[0]:
            group = plan.groups[0]
            return _attend(q, kv_cache, group, scale, window, softcap)[group.place]
        out = q.new_zeros(q.shape[0], q.shape[1] * q.shape[2])
        for group in plan.groups:
            out[group.target] = _attend(q, kv_cache, group, scale, window, softcap)[group.place]
        return out

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        """`act(x[:, :F]) * x[:, F:]`."""
        gate, up = x.chunk(2, dim=-1)
        act = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
        return act.mul_(up)

    def take_rows(self, x: Tensor, indices: Tensor) -> Tensor:
        """`x[indices]`, a copy."""
        return x[indices.long()]

    def logits(self, x: Tensor, weight: LinearWeight, scale: float, softcap: float | None) -> Tensor:
        """fp32 logits; see `OpSet`."""
        logits = self.linear(x, weight)
        if scale != 1.0:
            logits.mul_(scale)
        return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def _pack_int4(parts: Sequence[StoredTensor]) -> tuple[Tensor, Tensor]:
    """`Q4_0` and `Q4_1` blocks in the layout of torch's int4 kernel: the codes are the file's, scales are rounded to bf16."""
    codes, scale_and_zero = [], []
    for part in parts:
        data = part.rows(0, part.shape[0])
        header = 2 if part.storage == "Q4_0" else 4
        blocks = data.reshape(part.shape[0], -1, header + _GROUP // 2)
        packed = blocks[:, :, header:]
        codes.append(np.concatenate([packed & 15, packed >> 4], axis=2).reshape(part.shape).astype(np.int32))
        scale = np.ascontiguousarray(blocks[:, :, :2]).view(np.float16).astype(np.float32)[:, :, 0]
        zero = np.zeros_like(scale)
        if part.storage == "Q4_1":
            zero = np.ascontiguousarray(blocks[:, :, 2:4]).view(np.float16).astype(np.float32)[:, :, 0] + 8 * scale
        scale_and_zero.append(np.stack([scale, zero], axis=-1))
        part.release()
    weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.from_numpy(np.concatenate(codes)), 1)
    return weight, torch.from_numpy(np.concatenate(scale_and_zero)).bfloat16().transpose(0, 1).contiguous()


def _per_row_int8(embedding: Embedding) -> tuple[Tensor, Tensor]:
    """Codes with one scale per row instead of one per 32 elements, converted 4,096 rows at a time."""
    assert embedding.scales is not None
    codes, scales = torch.empty_like(embedding.table), torch.empty(len(embedding.table), dtype=torch.bfloat16)
    for start in range(0, len(codes), 4096):
        part = slice(start, start + 4096)
        rows = (embedding.table[part].float().unflatten(1, (-1, _GROUP)) * embedding.scales[part, :, None]).flatten(1)
        scales[part] = (rows.abs().amax(1) / 127).clamp(min=1e-12).bfloat16()
        codes[part] = (rows / scales[part].float()[:, None]).round().clamp(-127, 127).to(torch.int8)
    return codes, scales


def _row_group(
    metadata: AttentionMetadata, rows: np.ndarray[Any, np.dtype[np.int64]], starts: Any, seq_lens: Any
) -> RowGroup:
    """The padded view of some rows."""
    first_token, lengths = starts[rows][:, None], seq_lens[rows]
    query_lens = (starts[rows + 1] - starts[rows])[:, None]
    width = -(-int(lengths.max()) // metadata.block_size)
    place = np.arange(query_lens.max())
    inside = np.minimum(place, query_lens - 1)
    token = (first_token + inside).reshape(-1)
    real = np.flatnonzero((place < query_lens).reshape(-1))
    return RowGroup(
        token=torch.from_numpy(token),
        place=torch.from_numpy(real),
        target=torch.from_numpy(token[real]),
        position=torch.from_numpy(lengths[:, None] - query_lens + inside),
        blocks=metadata.block_table[torch.from_numpy(rows), :width].reshape(-1),
        num_rows=len(rows),
        num_positions=width * metadata.block_size,
    )


def _mask(group: RowGroup, window: int | None) -> Tensor:
    """The group's mask for `window`, made by the first layer that needs it."""
    if window not in group.masks:
        position = group.position[:, None, :, None]
        key = torch.arange(group.num_positions)
        hidden = key > position
        if window is not None:
            hidden |= key <= position - window
        group.masks[window] = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
    return group.masks[window]


def _attend(
    q: Tensor, kv_cache: Tensor, group: RowGroup, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """`[n * Q, H * d]`: gather the rows' blocks to `[n, K, L, d]`, then all heads of a key/value head as further queries."""
    _, heads, dim = q.shape
    rows, kv_heads = group.num_rows, kv_cache.shape[2]
    share = heads // kv_heads
    cached = kv_cache.index_select(0, group.blocks).unflatten(0, (rows, -1))
    keys, values = cached.permute(2, 0, 3, 1, 4, 5).to(q.dtype, memory_format=torch.contiguous_format).flatten(3, 4)
    # [n, K, share * Q, d]
    queries = q[group.token].view(rows, -1, kv_heads, share, dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    mask = _mask(group, window)
    if mask.shape[2] > 1 and share > 1:
        mask = mask.repeat(1, 1, share, 1)
    if softcap is None:
        out = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
    else:
        scores = (queries @ keys.transpose(2, 3)).mul_(scale / softcap).tanh_().mul_(softcap)
        out = scores.add_(mask).softmax(-1) @ values
    result: Tensor = out.unflatten(2, (share, -1)).permute(0, 3, 1, 2, 4).reshape(-1, heads * dim)
    return result


def _rotate(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first elements of each head of `x` `[T, heads, d]` by `angles` `[2, T, 1, rotary_dim]` of `rope_table`."""
    cos, sin = angles
    size = cos.shape[-1]
    turned = x[..., :size]
    if interleaved:
        turned = turned.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    turned = torch.addcmul(turned * cos, turned.roll(size // 2, -1), sin)
    if interleaved:
        turned = turned.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return turned if size == x.shape[-1] else torch.cat([turned, x[..., size:]], dim=-1)
