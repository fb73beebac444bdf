"""Prefill attention over the paged KV cache `[num_blocks, 2, K, B, d]`, in portable Triton.

FlashAttention-2's partition (Dao, 2023, section 3.2): one tile of queries of one head a program, an online softmax over tiles of
keys that are gathered through the block table. Lengths are read on the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _capped(scores, scale, softcap, SOFTCAP: tl.constexpr):
    """Scores in units of log 2, after the soft cap; `tanh(u) = 2 sigmoid(2u) - 1`."""
    if SOFTCAP:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores * scale / softcap) - 1.0)
        return scores * 1.4426950408889634
    return scores * (scale * 1.4426950408889634)


@triton.jit
def softmax_step(q, k, v, visible, best, total, acc, scale, softcap, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """One tile of the online softmax: `[M, D]` queries, `[D, N]` keys, `[N, D]` values."""
    scores = _capped(tl.dot(q, k, input_precision=PRECISION), scale, softcap, SOFTCAP)
    scores = tl.where(visible, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, 1))
    # Rows that have seen no key so far keep weight 0 instead of exp(-inf + inf).
    base = tl.where(new_best == float("-inf"), 0.0, new_best)
    weights = tl.exp2(scores - base[:, None])
    carry = tl.exp2(best - base)
    total = total * carry + tl.sum(weights, 1)
    acc = acc * carry[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return new_best, total, acc


@triton.jit(do_not_specialize=["num_rows", "table_stride"])
def _prefill_kernel(
    q, cache, table, starts, lengths, out, scale, softcap, num_rows,
    q_stride, table_stride, block_stride, kv_stride, head_stride,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Tile `pid` of all rows' tiles: row `r` owns the tiles from `starts[r] // BM + r` on, more than it needs."""
    # Late tiles have the most keys: they begin first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    base = tl.load(starts)
    low, high = 0, num_rows
    while high - low > 1:
        middle = (low + high) // 2
        first = (tl.load(starts + middle) - base) // BM + middle
        low = tl.where(first <= tile, middle, low)
        high = tl.where(first <= tile, high, middle)
    row = low
    start = tl.load(starts + row)
    count = tl.load(starts + row + 1) - start
    inside = (tile - (start - base) // BM - row) * BM
    if (inside < count) & (count >= LEAST):
        length = tl.load(lengths + row)
        offset = inside + tl.arange(0, BM)
        column = tl.arange(0, DIM)
        in_head = column < D
        position = length - count + offset
        token = (start + offset).to(tl.int64)
        rows = (offset < count)[:, None] & in_head[None, :]
        queries = tl.load(q + token[:, None] * q_stride + head * D + column[None, :], mask=rows, other=0.0)
        best = tl.full([BM], float("-inf"), tl.float32)
        total = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, DIM], tl.float32)
        stop = tl.minimum(length, length - count + inside + BM)
        begin = 0
        if WINDOW > 0:
            begin = tl.maximum(0, length - count + inside - WINDOW + 1) // BN * BN
        of_head = cache + (head // GROUP).to(tl.int64) * head_stride
        blocks = table + tl.cast(row, tl.int64) * table_stride
        for at in range(begin, stop, BN):
            key = at + tl.arange(0, BN)
            known = key < length
            if WINDOW > 0:
                known = known & (key > length - count + inside - WINDOW)
            block = tl.load(blocks + key // BLOCK, mask=known, other=0).to(tl.int64)
            source = of_head + block * block_stride + (key % BLOCK) * D
            k = tl.load(source[None, :] + column[:, None], mask=known[None, :] & in_head[:, None], other=0.0)
            v = tl.load(
                source[:, None] + kv_stride + column[None, :], mask=known[:, None] & in_head[None, :], other=0.0
            )
            visible = (key[None, :] <= position[:, None]) & known[None, :]
            if WINDOW > 0:
                visible = visible & (key[None, :] > position[:, None] - WINDOW)
            best, total, acc = softmax_step(
                queries, k, v, visible, best, total, acc, scale, softcap, SOFTCAP, PRECISION
            )
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(
            out + token[:, None] * q_stride + head * D + column[None, :], result.to(out.dtype.element_ty), mask=rows
        )


def prefill_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    num_tokens: int,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    min_query_len: int = 1,
    tile_queries: int | None = None,
) -> None:
    """Causal attention of rows of any query length; a token's result depends on no other token's query.

    Args:
        q: `[T, H, d]`.
        kv_cache: `[num_blocks, 2, K, B, d]`.
        block_table: `[R, max_blocks]` int32.
        query_start_loc: `[R + 1]` int32, tokens of `q`; the first need not be 0.
        seq_lens: `[R]` int32.
        out: like `q`, written for the rows' tokens.
        num_tokens: how many tokens the rows have at most.
        scale: factor of the scores.
        window: a token sees so many last positions, its own included.
        softcap: scores become `softcap * tanh(score / softcap)`.
        min_query_len: rows of fewer queries are left out, and their outputs alone.
        tile_queries: queries of a program, instead of what is fastest for long prompts; a power of two.
    """
    rows, heads, dim = block_table.shape[0], q.shape[1], q.shape[2]
    padded = max(16, triton.next_power_of_2(dim))
    exact = q.dtype == torch.float32
    tile_m, tile_n = (32, 32) if exact else (tile_queries or 128, 64 if padded <= 128 else 32)
    grid = (triton.cdiv(num_tokens, tile_m) + rows, heads)
    _prefill_kernel[grid](
        q, kv_cache, block_table, query_start_loc, seq_lens, out, scale, softcap or 0.0, rows,
        q.stride(0), block_table.stride(0), *kv_cache.stride()[:3],
        heads // kv_cache.shape[2], kv_cache.shape[3], dim, padded, tile_m, tile_n,
        window or 0, softcap is not None, "ieee" if exact else "tf32", min_query_len,
        num_warps=4 if tile_m <= 64 else 8, num_stages=1 if exact else 3,
    )  # fmt: skip
