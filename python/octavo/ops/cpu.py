"""The CPU, for speed: quantized products in Rust, the rest in torch; few operations per layer, no Python loop over tokens.

Decode is bound by reading weights, so 4-bit and 8-bit weights stay as the file has them, and activations are rounded to 8 bits on
the way into a product. Activations are fp32, the KV cache is bf16. Attention gathers each row's blocks and runs over rows in bulk,
in groups of similar query and sequence lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from octavo import _core
from octavo._core import PackedMatrix
from octavo.ops.base import Activation, AttentionMetadata, StoredTensor
from octavo.ops.experts import ExpertOps
from octavo.ops.host import lazy_zeros, read_bias, read_matrix, read_vector, rope_angles

Indices: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

_CPU = torch.device("cpu")
_PACKED = ("Q4_0", "Q4_1", "Q8_0")
_PACKED_ROWS = 64
"""Where the processor multiplies tiles of bf16 (AMX), larger steps use a dense copy; elsewhere packed weights win at any size."""

_SERIAL_TOKENS = 64
"""Steps of at most this many tokens run torch's own operations on one thread if all products are packed: they are too small to
share, and torch's waiting threads spin for milliseconds on the cores that the products' threads need."""


@dataclass(slots=True)
class LinearWeight:
    """One weight in up to two forms; at least one is there."""

    dense: Tensor | None
    """`[in, out]`, a transposed view, bf16 or fp32."""
    packed: PackedMatrix | None
    """`[out, in]`."""
    bias: Tensor | None


@dataclass(slots=True)
class Embedding:
    """A table `[V, D]` in one of two forms."""

    dense: Tensor | None
    packed: PackedMatrix | None


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
    rows: Tensor
    """`[n, 1]` the step's rows, and"""
    columns: Tensor
    """`[n, L / B]` the columns of the block table that they read."""
    first_key: Tensor
    """`[n]` position of the first key."""
    num_rows: int
    num_positions: int
    masks: dict[int | None, Tensor] = field(default_factory=dict)
    """Per window, 0 where a query sees a position and -inf elsewhere: `[n, 1, Q, L]`."""


@dataclass(slots=True)
class AttentionStep:
    """One cache group's part of a step: what its rows read, and where its keys and values go."""

    groups: list[RowGroup]
    """The same objects, with their masks, for all cache groups of one window."""
    blocks: list[Tensor]
    """Of each of them `[n * L / B]` block ids."""
    block: Tensor
    offset: Tensor
    angles: dict[int, tuple[Tensor, Tensor]]
    """Per rope table, by `id`, the table and its rows of the step's positions, taken by the step's first layer."""


class CpuOps(ExpertOps):
    """The op set of torch on the CPU.

    Args:
        dtype: None: 4-bit and 8-bit weights stay packed and the cache is bf16. Given: all weights and the cache are of this type.

    Products of packed weights use a pool of `torch.get_num_threads()` threads, as it is when the op set is made. Each step sets
    torch's own number.
    """

    name = "cpu"

    def __init__(self, dtype: torch.dtype | None = None):
        self._packed = dtype is None
        self._threads = torch.get_num_threads()
        self._all_packed = True
        self._dense_too = torch.cpu._is_amx_tile_supported()
        fast_bf16 = self._dense_too or torch.cpu._is_avx512_bf16_supported()
        self.device = _CPU
        self.dtype = torch.float32
        self.dense_dtype = dtype or (torch.bfloat16 if fast_bf16 else torch.float32)
        self.cache_dtype = dtype or torch.bfloat16

    # -- weights ---------------------------------------------------------------------------------------------------

    def vector(self, source: StoredTensor, offset: float = 0.0) -> Tensor:
        """The vector plus `offset`, fp32."""
        return read_vector(source, _CPU, torch.float32, offset)

    def linear_weight(self, parts: Sequence[StoredTensor], biases: Sequence[StoredTensor] = ()) -> LinearWeight:
        """`parts` stacked along `out`: packed if all are stored in 4 or 8 bits, else dense."""
        packed = self._pack(parts)
        dense = None
        if packed is None or self._dense_too:
            dense = read_matrix(parts, _CPU, self.dense_dtype).t()
        self._all_packed &= packed is not None
        return LinearWeight(dense, packed, read_bias(biases, _CPU, torch.float32))

    def embedding_weight(self, source: StoredTensor, tied: bool) -> tuple[Embedding, LinearWeight | None]:
        """Tables of 4 or 8 bits stay packed; the head shares the table's memory."""
        packed = self._pack([source])
        dense = read_matrix([source], _CPU, self.dense_dtype) if packed is None else None
        self._all_packed &= packed is not None or not tied
        head = LinearWeight(None if dense is None else dense.t(), packed, None) if tied else None
        return Embedding(dense, packed), head

    def _pack(self, parts: Sequence[StoredTensor]) -> PackedMatrix | None:
        if not self._packed or any(part.storage not in _PACKED for part in parts):
            return None
        stored = [(part.storage, part.rows(0, part.shape[0])) for part in parts]
        return PackedMatrix(stored, lambda index, rows: parts[index].release(rows))

    def rope_table(self, variants: Sequence[Sequence[float]], magnitude: float, max_positions: int) -> Tensor:
        """`[2, max_positions * len(variants), 1, rotary_dim]`: cosines, and sines whose first half is negated."""
        cos, sin = rope_angles(variants, magnitude, max_positions)
        return torch.stack([torch.cat([cos, cos], 1), torch.cat([-sin, sin], 1)]).unsqueeze(2)

    def kv_cache(self, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int) -> Tensor:
        """Zeros, bf16."""
        return lazy_zeros((num_blocks, 2, num_kv_heads, block_size, head_dim), self.device, self.cache_dtype)

    def kv_cache_bytes(self, num_kv_heads: int, block_size: int, head_dim: int) -> int:
        """Bytes of one block of one layer."""
        return 2 * num_kv_heads * block_size * head_dim * self.cache_dtype.itemsize

    # -- a step ----------------------------------------------------------------------------------------------------

    def can_be_captured(self) -> bool:
        """Never."""
        return False

    def prepare_attention(self, metadata: AttentionMetadata) -> list[AttentionStep]:
        """Group the rows so that padding at most doubles the queries and quadruples the positions of a row."""
        serial = self._all_packed and metadata.slot_mapping.shape[1] <= _SERIAL_TOKENS
        torch.set_num_threads(1 if serial else self._threads)
        starts, seq_lens = metadata.query_start_loc.numpy(), metadata.seq_lens.numpy().astype(np.int64)
        rows = np.flatnonzero(np.diff(starts))
        by_window: dict[int | None, list[RowGroup]] = {}
        angles: dict[int, tuple[Tensor, Tensor]] = {}
        steps = []
        for slots, table, window in zip(
            metadata.slot_mapping.long(), metadata.block_table, metadata.group_windows, strict=True
        ):
            if window not in by_window:
                by_window[window] = _row_groups(metadata.block_size, window, rows, starts, seq_lens)
            groups = by_window[window]
            blocks = [table[group.rows, group.columns].reshape(-1) for group in groups]
            block, offset = slots // metadata.block_size, slots % metadata.block_size
            steps.append(AttentionStep(groups, blocks, block, offset, angles))
        return steps

    def embed(self, ids: Tensor, table: Embedding, scale: float) -> Tensor:
        """`table[ids] * scale`, fp32."""
        if table.packed is not None:
            rows = torch.empty(ids.shape[0], table.packed.shape[1])
            table.packed.read_rows(ids.long().numpy(), rows.numpy())
        else:
            assert table.dense is not None
            rows = table.dense[ids.long()].float()
        return rows.mul_(scale) if scale != 1.0 else rows

    def linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """`x @ weight.T + bias`, fp32 in and out."""
        packed = weight.packed
        if packed is not None and (weight.dense is None or x.shape[0] <= _PACKED_ROWS):
            out = torch.empty(x.shape[0], packed.shape[0])
            packed.linear(x.contiguous().numpy(), out.numpy(), self._threads)
        else:
            assert weight.dense is not None
            out = torch.mm(x.to(weight.dense.dtype), weight.dense).float()
        return out if weight.bias is None else out.add_(weight.bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x / sqrt(mean(x²) + eps) * weight`."""
        rows = x.contiguous()
        out = torch.empty_like(rows)
        width = x.shape[-1]
        _core.rms_norm(rows.view(-1, width).numpy(), weight.numpy(), eps, out.view(-1, width).numpy())
        return out

    def add_rms_norm(
        self, residual: Tensor, x: Tensor, scale: float, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """The norm of `residual + scale * x`, and that sum in `residual`'s memory."""
        out = torch.empty_like(residual)
        _core.add_rms_norm(residual.numpy(), x.contiguous().numpy(), scale, weight.numpy(), eps, out.numpy())
        return out, residual

    def add(self, residual: Tensor, x: Tensor, scale: float) -> Tensor:
        """`residual + scale * x`."""
        return torch.add(residual, x, alpha=scale)

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
            turned = torch.cat([self._norm_heads(part, norm, eps) for part, norm in norms], dim=1)
        turned = _rotate(turned, _angles(plan, rope, positions), interleaved)
        pair = torch.stack([turned[:, -kv_heads:], heads[:, -kv_heads:]], dim=1).to(self.cache_dtype)
        # Finite, so that a later owner of the block can multiply what it does not see by 0.
        kv_cache[plan.block, :, :, plan.offset] = pair.nan_to_num_()
        return turned[:, :-kv_heads]

    def _norm_heads(self, heads: Tensor, norm: Tensor, eps: float) -> Tensor:
        """A norm of each head of `[T, heads, d]`, or of all of a token's together, by the weight's size."""
        return self.rms_norm(heads.reshape(len(heads), -1, len(norm)), norm, eps).view(heads.shape)

    def attention(
        self, q: Tensor, kv_cache: Tensor, step: Any, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Attention of each group in bulk; see `OpSet`."""
        plan: AttentionStep = step
        if len(plan.groups) == 1 and len(plan.groups[0].place) == q.shape[0]:
            group = plan.groups[0]
            return _attend(q, kv_cache, group, plan.blocks[0], scale, window, softcap)[group.place]
        out = q.new_zeros(q.shape[0], q.shape[1] * q.shape[2])
        for group, blocks in zip(plan.groups, plan.blocks, strict=True):
            out[group.target] = _attend(q, kv_cache, group, blocks, scale, window, softcap)[group.place]
        return out

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        """`act(x[:, :F]) * x[:, F:]`."""
        gate, up = x.chunk(2, dim=-1)
        act = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
        return act.mul_(up)

    def take_rows(self, x: Tensor, indices: Tensor) -> Tensor:
        """`x[indices]`, a copy."""
        return x[indices.long()]

    def logits(
        self, x: Tensor, weight: LinearWeight, scale: float, softcap: float | None, out: Tensor | None = None
    ) -> Tensor:
        """fp32 logits; see `OpSet`."""
        logits = self.linear(x, weight)
        if scale != 1.0:
            logits.mul_(scale)
        if softcap is not None:
            logits.div_(softcap).tanh_().mul_(softcap)
        return logits if out is None else out.copy_(logits)


def _row_groups(block_size: int, window: int | None, rows: Indices, starts: Any, seq_lens: Indices) -> list[RowGroup]:
    """The rows by powers of 2 of their query length and of 4 of the positions they see."""
    query_lens = np.diff(starts)[rows]
    first = np.zeros_like(rows)
    if window is not None:
        # From the block that holds the first position seen by the row's first query.
        first = np.maximum(seq_lens[rows] - query_lens - window + 1, 0) // block_size
    visible = seq_lens[rows] - first * block_size
    keys = np.ceil(np.log2(query_lens)) * 64 + np.ceil(np.log2(visible) / 2)
    return [_row_group(block_size, rows[keys == key], first[keys == key], starts, seq_lens) for key in np.unique(keys)]


def _row_group(block_size: int, rows: Indices, first_column: Indices, starts: Any, seq_lens: Indices) -> RowGroup:
    """The padded view of some rows whose keys begin at `first_column` of the block table."""
    first_token, lengths = starts[rows][:, None], seq_lens[rows]
    query_lens = (starts[rows + 1] - starts[rows])[:, None]
    columns = -(-lengths // block_size)
    place = np.arange(query_lens.max())
    inside = np.minimum(place, query_lens - 1)
    token = (first_token + inside).reshape(-1)
    real = np.flatnonzero((place < query_lens).reshape(-1))
    column = first_column[:, None] + np.arange((columns - first_column).max())
    return RowGroup(
        token=torch.from_numpy(token),
        place=torch.from_numpy(real),
        target=torch.from_numpy(token[real]),
        position=torch.from_numpy(lengths[:, None] - query_lens + inside),
        rows=torch.from_numpy(rows)[:, None],
        columns=torch.from_numpy(np.minimum(column, columns[:, None] - 1)),
        first_key=torch.from_numpy(first_column * block_size),
        num_rows=len(rows),
        num_positions=column.shape[1] * block_size,
    )


def _mask(group: RowGroup, window: int | None) -> Tensor:
    """The group's mask for `window`, made by the first layer that needs it."""
    if window not in group.masks:
        position = group.position[:, None, :, None]
        key = (group.first_key[:, None] + torch.arange(group.num_positions))[:, None, None]
        hidden = key > position
        if window is not None:
            hidden |= key <= position - window
        group.masks[window] = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
    return group.masks[window]


def _attend(
    q: Tensor,
    kv_cache: Tensor,
    group: RowGroup,
    blocks: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """`[n * Q, H * d]`: gather the rows' blocks to `[n, K, L, d]`, then all heads of a key/value head as further queries."""
    _, heads, dim = q.shape
    rows, kv_heads = group.num_rows, kv_cache.shape[2]
    share = heads // kv_heads
    cached = kv_cache.index_select(0, blocks).unflatten(0, (rows, -1))
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


def _angles(step: AttentionStep, rope: Tensor, positions: Tensor) -> Tensor:
    """`[2, T, 1, rotary_dim]`, the same for all layers of the step that share the table."""
    if id(rope) not in step.angles:
        step.angles[id(rope)] = rope, rope[:, positions]
    return step.angles[id(rope)][1]


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
