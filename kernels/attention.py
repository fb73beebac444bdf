"""Attention over the paged KV cache `[num_blocks, 2, K, B, d]`, in portable Triton.

Prefill: FlashAttention-2's partition (Dao, 2023, section 3.2), one tile of queries of one head a program, an online softmax over
tiles of keys that are gathered through the block table. Decode and verify: the query heads of a key/value head are rows of one
product, and a sequence's keys are split over programs whose results are merged by their log-sum-exps (Flash-Decoding, Dao et al.,
2023; PagedAttention, Kwon et al., 2023). Lengths are read on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import launch
from octavo.kernels.launch import begin_dependent


@triton.jit
def _capped(scores, scale, softcap, SOFTCAP: tl.constexpr):
    """Scores in units of log 2, after the soft cap; `tanh(u) = 2 sigmoid(2u) - 1`."""
    if SOFTCAP:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores * scale / softcap) - 1.0)
        return scores * 1.4426950408889634
    return scores * (scale * 1.4426950408889634)


@triton.jit
def _step(q, k, v, visible, best, total, acc, scale, softcap, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
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
            best, total, acc = _step(queries, k, v, visible, best, total, acc, scale, softcap, SOFTCAP, PRECISION)
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(
            out + token[:, None] * q_stride + head * D + column[None, :], result.to(out.dtype.element_ty), mask=rows
        )


@triton.jit
def _cut(length, count, splits, BN: tl.constexpr, WINDOW: tl.constexpr):
    """How the keys of a row's `count` queries are split: the first key, keys of a split, and splits that have any."""
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(0, length - count - WINDOW + 1) // BN * BN
    # Two tiles at least: less is not worth a merge.
    share = tl.maximum(tl.cdiv(tl.cdiv(length - begin, splits), BN), 2) * BN
    return begin, share, tl.cdiv(length - begin, share)


@triton.jit(do_not_specialize=["table_stride", "num_tokens", "splits"])
def _decode_kernel(
    q, cache, table, starts, lengths, out, partial, lse, scale, softcap,
    q_stride, table_stride, block_stride, kv_stride, head_stride, num_tokens, splits,
    HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    DIM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row, key/value head and split a program; row `m` of the tile is query `m // GROUP`, head `m % GROUP`.

    Rows of more than `QUERIES` queries are another kernel's.
    """
    begin_dependent(PDL)
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + row)
    count = tl.load(starts + row + 1) - start
    length = tl.load(lengths + row)
    begin, share, used = _cut(length, count, splits, BN, WINDOW)
    if (split >= used) | (count > QUERIES) | (count == 0):
        return
    m = tl.arange(0, BM)
    query = m // GROUP
    head = kv_head * GROUP + m % GROUP
    column = tl.arange(0, DIM)
    in_head = column < D
    is_query = (query < count) & (m < GROUP * QUERIES)
    token = (start + query).to(tl.int64)
    rows = is_query[:, None] & in_head[None, :]
    queries = tl.load(q + token[:, None] * q_stride + head[:, None] * D + column[None, :], mask=rows, other=0.0)
    position = length - count + query
    first = begin + split * share
    stop = tl.minimum(length, first + share)
    best = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DIM], tl.float32)
    of_head = cache + kv_head.to(tl.int64) * head_stride
    blocks = table + tl.cast(row, tl.int64) * table_stride
    for at in range(first, stop, BN):
        key = at + tl.arange(0, BN)
        known = key < stop
        if WINDOW > 0:
            known = known & (key > length - count - WINDOW)
        block = tl.load(blocks + key // BLOCK, mask=known, other=0).to(tl.int64)
        source = of_head + block * block_stride + (key % BLOCK) * D
        k = tl.load(source[None, :] + column[:, None], mask=known[None, :] & in_head[:, None], other=0.0)
        v = tl.load(source[:, None] + kv_stride + column[None, :], mask=known[:, None] & in_head[None, :], other=0.0)
        visible = (key[None, :] <= position[:, None]) & known[None, :]
        if WINDOW > 0:
            visible = visible & (key[None, :] > position[:, None] - WINDOW)
        best, total, acc = _step(queries, k, v, visible, best, total, acc, scale, softcap, SOFTCAP, PRECISION)
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if used == 1:
        tl.store(
            out + token[:, None] * q_stride + head[:, None] * D + column[None, :],
            result.to(out.dtype.element_ty),
            mask=rows,
        )
    else:
        place = (split.to(tl.int64) * num_tokens + token) * HEADS + head
        tl.store(partial + place[:, None] * D + column[None, :], result, mask=rows)
        tl.store(lse + place, tl.where(total == 0.0, float("-inf"), best + tl.log2(total)), mask=is_query)


@triton.jit(do_not_specialize=["num_tokens", "splits"])
def _merge_kernel(
    partial, lse, out, starts, lengths, num_tokens, q_stride, splits,
    HEADS: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr,
    S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head of one query a program: the results of the splits that have keys, `S` at a time, weighted by their sums."""
    begin_dependent(PDL)
    row, query, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + row)
    count = tl.load(starts + row + 1) - start
    _begin, _share, used = _cut(tl.load(lengths + row), count, splits, BN, WINDOW)
    if (used <= 1) | (query >= count) | (count > QUERIES):
        return
    token = (start + query).to(tl.int64)
    column = tl.arange(0, DIM)
    best, whole = float("-inf"), 0.0
    acc = tl.zeros([DIM], tl.float32)
    for first in range(0, used, S):
        split = first + tl.arange(0, S)
        place = (split.to(tl.int64) * num_tokens + token) * HEADS + head
        inside = (split < used)[:, None] & (column < D)[None, :]
        values = tl.load(partial + place[:, None] * D + column[None, :], mask=inside, other=0.0)
        logs = tl.load(lse + place, mask=split < used, other=float("-inf"))
        new_best = tl.maximum(best, tl.max(logs, 0))
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(logs - base)
        carry = tl.exp2(best - base)
        whole = whole * carry + tl.sum(weights, 0)
        acc = acc * carry + tl.sum(values * weights[:, None], 0)
        best = new_best
    result = acc / tl.where(whole == 0.0, 1.0, whole)
    tl.store(out + token * q_stride + head * D + column, result.to(out.dtype.element_ty), mask=column < D)


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
) -> None:
    """Causal attention of rows of any query length.

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
    """
    rows, heads, dim = block_table.shape[0], q.shape[1], q.shape[2]
    padded = max(16, triton.next_power_of_2(dim))
    exact = q.dtype == torch.float32
    tile_m, tile_n = (32, 32) if exact else (128, 64 if padded <= 128 else 32)
    grid = (triton.cdiv(num_tokens, tile_m) + rows, heads)
    _prefill_kernel[grid](
        q, kv_cache, block_table, query_start_loc, seq_lens, out, scale, softcap or 0.0, rows,
        q.stride(0), block_table.stride(0), *kv_cache.stride()[:3],
        heads // kv_cache.shape[2], kv_cache.shape[3], dim, padded, tile_m, tile_n,
        window or 0, softcap is not None, "ieee" if exact else "tf32", min_query_len,
        num_warps=4 if exact else 8, num_stages=1 if exact else 3,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """How decode attention is cut: measured by `benches/gpu/decode_tiles.py`."""

    keys: int
    """Keys of a tile."""
    warps: int
    stages: int
    fill: float
    """Programs for each multiprocessor, before they become too short."""


_USUAL = DecodeTiles(keys=64, warps=2, stages=3, fill=4.0)
_WIDE = DecodeTiles(keys=64, warps=4, stages=3, fill=2.0)
_EXACT = DecodeTiles(keys=32, warps=4, stages=1, fill=2.0)


def decode_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    max_query_len: int,
    max_seq_len: int,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    tiles: DecodeTiles | None = None,
) -> None:
    """`prefill_attention` for rows of at most `max_query_len` queries, in sequences of at most `max_seq_len` tokens.

    Rows of more queries, and empty ones, are left out.
    """
    rows, (tokens, heads, dim), kv_heads = block_table.shape[0], q.shape, kv_cache.shape[2]
    group = heads // kv_heads
    exact = q.dtype == torch.float32
    padded = max(16, triton.next_power_of_2(dim))
    tiles = tiles or (_EXACT if exact else _USUAL if padded <= 128 else _WIDE)
    tile_m = max(16, triton.next_power_of_2(group * max_query_len))
    longest = min(max_seq_len, window or max_seq_len)
    splits = num_splits(rows * kv_heads, longest, tiles, launch.multiprocessors(q.device))
    dependent = launch.dependent_launch(q.device)
    options = launch.launch_options(dependent)
    partial = torch.empty(splits if splits > 1 else 0, tokens, heads, dim, device=q.device, dtype=torch.float32)
    lse = torch.empty(partial.shape[:3], device=q.device, dtype=torch.float32)
    _decode_kernel[(rows, kv_heads, splits)](
        q, kv_cache, block_table, query_start_loc, seq_lens, out, partial, lse, scale, softcap or 0.0,
        q.stride(0), block_table.stride(0), *kv_cache.stride()[:3], tokens, splits,
        heads, group, max_query_len, kv_cache.shape[3], dim, padded, tile_m, tiles.keys,
        window or 0, softcap is not None, "ieee" if exact else "tf32", dependent,
        num_warps=tiles.warps, num_stages=tiles.stages, **options,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(rows, max_query_len, heads)](
            partial, lse, out, query_start_loc, seq_lens, tokens, out.stride(0), splits,
            heads, max_query_len, dim, padded, tiles.keys, window or 0, 32, dependent, num_warps=4, **options,
        )  # fmt: skip


def num_splits(programs: int, length: int, tiles: DecodeTiles, multiprocessors: int) -> int:
    """Splits of each sequence so that the programs fill the device, of two tiles each or more."""
    wanted = max(1, int(tiles.fill * multiprocessors / max(1, programs)))
    return max(1, min(wanted, length // (2 * tiles.keys), 128))
