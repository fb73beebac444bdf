"""The first two generations of attention, for comparison: scores in memory, and FlashAttention-1's order of loops.

The later ones are the product's: FlashAttention-2's partition is `octavo.kernels.attention`, FlashAttention-3's pipeline
`octavo.kernels.hopper`. Queries are `[B, S, H, d]`, keys and values `[B, S, K, d]`, contiguous; attention is causal.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_ROWS = 64
"""Queries of FlashAttention-1's inner loop."""
BLOCK_COLUMNS = 128
"""Keys of its outer loop."""
WARPS = 4
STAGES = 2


def naive(q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float) -> None:
    """All scores in fp32 in memory, then their softmax, then the weighted values, as the formula says."""
    batch, length, heads, dim = q.shape
    kv_heads = k.shape[2]
    # [B, K, G, S, d] and [B, K, 1, S, d]: the queries that share a key/value head side by side.
    queries = q.view(batch, length, kv_heads, -1, dim).permute(0, 2, 3, 1, 4)
    keys, values = (part.transpose(1, 2)[:, :, None] for part in (k, v))
    scores = torch.matmul(queries, keys.transpose(3, 4)).float().mul_(scale)
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu_(1)
    weights = scores.masked_fill_(hidden, -torch.inf).softmax(dim=-1)
    del scores
    mixed = torch.matmul(weights.to(v.dtype), values)
    out.view(batch, length, kv_heads, heads // kv_heads, dim).copy_(mixed.permute(0, 3, 1, 2, 4))


@triton.jit(do_not_specialize=["length"])
def _flash_1_kernel(
    q, k, v, out, best, total, length, scale, heads,
    GROUP: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One head of one sequence a program, as in Dao et al., 2022, algorithm 1: the outer loop takes a tile of keys, the inner one
    all tiles of queries that see it, whose outputs, maxima and sums it reads, brings up to date and writes back."""
    head, sequence = tl.program_id(0), tl.program_id(1)
    kv_heads = heads // GROUP
    row, column, dim = tl.arange(0, BR), tl.arange(0, BC), tl.arange(0, D)
    of_queries = (sequence.to(tl.int64) * length * heads + head) * D
    of_keys = (sequence.to(tl.int64) * length * kv_heads + head // GROUP) * D
    of_sums = (sequence.to(tl.int64) * heads + head) * length
    for at in range(0, length, BC):
        key = at + column
        known = key < length
        place = of_keys + key.to(tl.int64) * kv_heads * D
        keys = tl.load(k + place[None, :] + dim[:, None], mask=known[None, :], other=0.0)
        values = tl.load(v + place[:, None] + dim[None, :], mask=known[:, None], other=0.0)
        for first in range(at // BR * BR, length, BR):
            query = first + row
            inside = query < length
            target = of_queries + query.to(tl.int64)[:, None] * heads * D + dim[None, :]
            queries = tl.load(q + target, mask=inside[:, None], other=0.0)
            scores = tl.dot(queries, keys, input_precision=PRECISION) * (scale * 1.4426950408889634)
            scores = tl.where((key[None, :] <= query[:, None]) & known[None, :], scores, float("-inf"))
            old_best = tl.load(best + of_sums + query, mask=inside & (at > 0), other=float("-inf"))
            old_total = tl.load(total + of_sums + query, mask=inside & (at > 0), other=0.0)
            old = tl.load(out + target, mask=inside[:, None] & (at > 0), other=0.0)
            tile_best = tl.max(scores, 1)
            new_best = tl.maximum(old_best, tile_best)
            # Queries before the tile's first key keep what they have.
            base = tl.where(new_best == float("-inf"), 0.0, new_best)
            weights = tl.exp2(scores - base[:, None])
            carry = tl.exp2(old_best - base)
            new_total = old_total * carry + tl.sum(weights, 1)
            mixed = tl.dot(weights.to(v.dtype.element_ty), values, input_precision=PRECISION)
            share = 1.0 / tl.where(new_total == 0.0, 1.0, new_total)
            tl.store(out + target, (old * (old_total * carry)[:, None] + mixed) * share[:, None], mask=inside[:, None])
            tl.store(best + of_sums + query, new_best, mask=inside)
            tl.store(total + of_sums + query, new_total, mask=inside)
        # What was written is read by other threads in the next turn.
        tl.debug_barrier()


def flash_1(q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float) -> None:
    """FlashAttention-1's order of loops; outputs are kept in fp32 between the turns."""
    batch, length, heads, dim = q.shape
    kept = torch.empty(q.shape, device=q.device, dtype=torch.float32)
    best, total = (torch.empty(batch, heads, length, device=q.device, dtype=torch.float32) for _ in range(2))
    exact = q.dtype == torch.float32
    _flash_1_kernel[(heads, batch)](
        q, k, v, kept, best, total, length, scale, heads,
        heads // k.shape[2], dim, BLOCK_ROWS, BLOCK_COLUMNS, "ieee" if exact else "tf32",
        num_warps=WARPS, num_stages=1 if exact else STAGES,
    )  # fmt: skip
    out.copy_(kept)


def counted_bytes(generation: str, batch: int, length: int, heads: int, kv_heads: int, dim: int, tile: int) -> float:
    """What the programs of a generation read and write outside of their own memory, in bf16; caches catch a part of it.

    Args:
        generation: `naive`, `FA-1`, or a later one: they differ by their `tile`.
        batch: sequences.
        length: of each.
        heads: of queries.
        kv_heads: of keys and values.
        dim: of a head.
        tile: queries that read a key together; not for the first two.
    """
    once = batch * length * dim * 2.0
    pairs = batch * heads * float(length) ** 2
    if generation == "naive":
        # Scores are written in bf16, read and written in fp32, scaled, masked, read and written by the softmax, rounded, and read.
        return once * (2 * heads + 2 * kv_heads) + pairs * (2 + 2 + 4 + 8 + 8 + 4 + 4 + 4 + 2 + 2)
    if generation == "FA-1":
        turns = batch * heads * (length**2 / (2 * BLOCK_COLUMNS) + length / 2)
        # Queries, outputs read and written in fp32, two sums read and written; at the end the outputs' rounding.
        return 2 * heads * once + turns * (dim * (2 + 4 + 4) + 16) + heads * once * 3
    reads = batch * heads * (length**2 / (2 * tile) + length / 2)
    return 2 * heads * once + reads * dim * 2 * 2
