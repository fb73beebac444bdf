"""Plain torch, fp32: the oracle that every other op set is compared with.

Obviously right first. Also batch-invariant: the numbers of a token do not depend, to the last bit, on the other tokens
of the step, on how its prompt is cut into chunks, or on where its blocks lie. Hence matrix products always run at one
shape, a tile of 16 rows; attention is an online softmax (Milakov & Gimelshein, 2018) over tiles of 128 positions
counted from the sequence's start, for tiles of 16 queries; and transcendental functions are evaluated in fp64, where
the vectorised and the scalar code of a tail round to the same fp32 number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from octavo.ops.base import Activation, AttentionMetadata
from octavo.ops.dense import DenseOps, LinearWeight

ROW_TILE = 16
KV_TILE = 128


@dataclass(slots=True)
class AttentionStep:
    """Queries of a step in tiles of `ROW_TILE` that lie in one row each; `N` tiles."""

    tile_row: Tensor
    """`[N]` the row of each tile."""
    token: Tensor
    """`[N, ROW_TILE]` the step's token at each place; places past the row's end repeat its last token."""
    position: Tensor
    """`[N, ROW_TILE]` position of that token in its sequence."""
    tile_place: Tensor
    """`[T]` the place of each token among the `N * ROW_TILE`; 0 for padding tokens."""
    slot_mapping: Tensor
    """`[T]` of the cache group, as is"""
    block_table: Tensor
    """`[R, max_blocks]`."""
    first: Tensor
    """`[R]` position of the row's first query."""
    seq_lens: Tensor
    block_size: int
    max_seq_len: int


class ReferenceOps(DenseOps):
    """The op set in plain torch on `device`. Activations, weights and cache are `dtype`."""

    name = "reference"

    def __init__(self, device: str = "cpu", dtype: torch.dtype = torch.float32):
        super().__init__(device, dtype)

    def can_be_captured(self) -> bool:
        """Never."""
        return False

    def prepare_attention(self, metadata: AttentionMetadata) -> list[AttentionStep]:
        """Cut each row's queries into tiles of `ROW_TILE` at positions that are multiples of it."""
        starts, seq_lens = metadata.query_start_loc.long(), metadata.seq_lens.long()
        query_lens = starts.diff()
        first = seq_lens - query_lens
        first_tile = first // ROW_TILE
        tiles = torch.where(query_lens > 0, (seq_lens + ROW_TILE - 1) // ROW_TILE - first_tile, 0)
        tile_row = torch.repeat_interleave(torch.arange(len(tiles), device=self.device), tiles)
        tile_start = tiles.cumsum(0) - tiles
        number = torch.arange(len(tile_row), device=self.device) - tile_start[tile_row] + first_tile[tile_row]
        place = torch.arange(ROW_TILE, device=self.device)
        position = number[:, None] * ROW_TILE + place
        inside = (position - first[tile_row, None]).clamp(min=0)
        token = starts[tile_row, None] + torch.minimum(inside, query_lens[tile_row, None] - 1)
        tile_place = torch.zeros(metadata.slot_mapping.shape[1], dtype=torch.long, device=self.device)
        real = (position >= first[tile_row, None]) & (position < seq_lens[tile_row, None])
        tile_place[token[real]] = torch.arange(token.numel(), device=self.device).view_as(token)[real]
        return [
            AttentionStep(
                tile_row=tile_row,
                token=token,
                position=position,
                tile_place=tile_place,
                slot_mapping=slot_mapping.long(),
                block_table=block_table.long(),
                first=first,
                seq_lens=seq_lens,
                block_size=metadata.block_size,
                max_seq_len=metadata.max_seq_len,
            )
            for slot_mapping, block_table in zip(metadata.slot_mapping, metadata.block_table, strict=True)
        ]

    def embed(self, ids: Tensor, table: Tensor, scale: float) -> Tensor:
        """`table[ids] * scale`."""
        return table[ids.long()] * scale

    def linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """`x @ weight.T + bias`, in tiles of `ROW_TILE` rows."""
        rows = x.shape[0]
        padded = pad(x, (0, 0, 0, -rows % ROW_TILE))
        out = torch.empty(padded.shape[0], weight.weight.shape[0], device=x.device, dtype=x.dtype)
        for start in range(0, rows, ROW_TILE):
            torch.mm(padded[start : start + ROW_TILE], weight.weight.t(), out=out[start : start + ROW_TILE])
        out = out[:rows]
        return out if weight.bias is None else out + weight.bias

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x / sqrt(mean(x²) + eps) * weight`."""
        variance = x.double().square().mean(-1, keepdim=True)
        return (x.double() * (variance + eps).rsqrt()).to(self.dtype) * weight

    def add_rms_norm(
        self, residual: Tensor, x: Tensor, scale: float, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """The norm of `residual + scale * x`, and that sum."""
        total = residual + scale * x
        return self.rms_norm(total, weight, eps), total

    def add(self, residual: Tensor, x: Tensor, scale: float) -> Tensor:
        """`residual + scale * x`."""
        return residual + scale * x

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
        """Split, normalise, rotate, store; see `OpSet`."""
        _, _, kv_heads, block_size, head_dim = kv_cache.shape
        heads = qkv.view(qkv.shape[0], -1, head_dim)
        q, k, v = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
        if q_norm is not None:
            q = self.rms_norm(q.reshape(len(q), -1, len(q_norm)), q_norm, eps).view(q.shape)
        if k_norm is not None:
            k = self.rms_norm(k.reshape(len(k), -1, len(k_norm)), k_norm, eps).view(k.shape)
        angles = rope[positions.long(), None]
        plan: AttentionStep = step
        slots = plan.slot_mapping
        kv_cache[slots // block_size, 0, :, slots % block_size] = _rotate(k, angles, interleaved)
        kv_cache[slots // block_size, 1, :, slots % block_size] = v
        return _rotate(q, angles, interleaved)

    def attention(
        self, q: Tensor, kv_cache: Tensor, step: Any, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Online softmax over tiles of `KV_TILE` positions; see `OpSet`."""
        plan: AttentionStep = step
        _, heads, dim = q.shape
        kv_heads = kv_cache.shape[2]
        tiles = len(plan.tile_row)
        # [N, K, group * ROW_TILE, d]: the queries that share a key/value head are rows of one product.
        queries = q[plan.token].unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).reshape(tiles, kv_heads, -1, dim)
        rows = queries.shape[2]
        position = plan.position.repeat(1, heads // kv_heads)[:, None, :, None]
        best = torch.full((tiles, kv_heads, rows, 1), -torch.inf, dtype=torch.float64, device=q.device)
        total = torch.zeros_like(best)
        acc = torch.zeros(tiles, kv_heads, rows, dim, dtype=torch.float64, device=q.device)
        for start in range(0, plan.max_seq_len, KV_TILE):
            keys, values, key_position = _gather(kv_cache, plan, start, window)
            scores = (queries @ keys.transpose(2, 3)).double() * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            visible = (key_position <= position) & (key_position < plan.seq_lens[plan.tile_row, None, None, None])
            if window is not None:
                visible &= key_position > position - window
            scores = scores.masked_fill(~visible, -torch.inf)
            new_best = torch.maximum(best, scores.amax(-1, keepdim=True))
            # Rows without a visible key so far keep weight 0 instead of exp(-inf + inf).
            base = new_best.masked_fill(new_best == -torch.inf, 0.0)
            weights, carry = torch.exp(scores - base), torch.exp(best - base)
            total = total * carry + weights.sum(-1, keepdim=True)
            acc = acc * carry + (weights.to(self.dtype) @ values).double()
            best = new_best
        out = (acc / total.clamp(min=1e-30)).to(self.dtype)
        out = out.view(tiles, kv_heads, -1, ROW_TILE, dim).permute(0, 3, 1, 2, 4).reshape(-1, heads * dim)
        return out[plan.tile_place] if tiles else q.reshape(q.shape[0], -1)

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        """`act(x[:, :F]) * x[:, F:]`."""
        gate, up = x.chunk(2, dim=-1)
        wide = gate.double()
        act = (
            torch.nn.functional.silu(wide)
            if activation == "silu"
            else torch.nn.functional.gelu(wide, approximate="tanh")
        )
        return act.to(self.dtype) * up


def _rotate(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first elements of each head of `x` `[T, heads, d]` by `angles` `[T, 1, cosines | sines]`."""
    cos, sin = angles.to(x.dtype).chunk(2, dim=-1)
    turned, rest = x[..., : angles.shape[-1]], x[..., angles.shape[-1] :]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        pairs = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        pairs = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    return torch.cat([pairs, rest], dim=-1)


def _gather(kv_cache: Tensor, plan: AttentionStep, start: int, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values `[N, K, KV_TILE, d]` of each tile's row at positions from `start`, and these positions.

    Values that no query of the row sees are zeroed: the block may hold what another owner left, and 0 * NaN is NaN.
    """
    position = torch.arange(start, start + KV_TILE, device=kv_cache.device)
    column = (position // plan.block_size).clamp(max=plan.block_table.shape[1] - 1)
    blocks = plan.block_table[:, column]
    # [R, KV_TILE, 2, K, d] -> [R, 2, K, KV_TILE, d]
    cached = kv_cache[blocks, :, :, position % plan.block_size].permute(0, 2, 3, 1, 4)
    keys, values = cached[:, 0], cached[:, 1]
    seen = position < plan.seq_lens[:, None]
    if window is not None:
        seen &= position > plan.first[:, None] - window
    values = torch.where(seen[:, None, :, None], values, 0.0)
    return keys[plan.tile_row], values[plan.tile_row], position
