"""Attention of decode and verify rows over the paged KV cache `[num_blocks, 2, K, B, d]`, in portable Triton: one launch.

The query heads of a key/value head are rows of one product; a sequence's keys are split over programs whose results are merged by
their maxima and sums (Flash-Decoding, Dao et al., 2023; PagedAttention, Kwon et al., 2023). `decode_schedule` says which tiles of
keys a program does: the end of one row and head, some whole ones, the beginning of another. What a program does alone it writes at
once; of those that share, the last to arrive merges, in the order of the keys: results do not depend on timing.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels import launch
from octavo.kernels.attention import softmax_step
from octavo.kernels.decode_schedule import ENTRY_WORDS, DecodeSchedule, DecodeShape, DecodeTiles, row_tiles
from octavo.kernels.launch import prefetch

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
# Values that a thread loads at a time when it merges, in registers.
_LOADED_VALUES = 64


@triton.jit
def _key_at(key, low, length):
    """The key itself, or the nearest one that the row has: what lies outside may be another sequence's, and is not seen."""
    return tl.minimum(tl.maximum(key, low), length - 1)


@triton.jit
def _attend(
    queries, best, total, acc, of_head, blocks, position, first, stop, low, length, scale, softcap, block_stride, kv_stride,
    BLOCK: tl.constexpr, D: tl.constexpr, BN: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """The online softmax over the tiles of keys from `first` to `stop`, of a row whose keys are `low` to `length - 1`."""
    DIM: tl.constexpr = acc.shape[1]
    column = tl.arange(0, DIM)
    across = None if D == DIM else (column < D)[None, :]
    down = None if D == DIM else (column < D)[:, None]
    fill = None if D == DIM else 0.0
    n = tl.arange(0, BN)
    block = tl.load(blocks + _key_at(first + n, low, length) // BLOCK)
    for at in range(first, stop, BN):
        key = at + n
        source = of_head + block.to(tl.int64) * block_stride + (_key_at(key, low, length) % BLOCK) * D
        # A tile ahead, so that keys and values wait for no other load.
        block = tl.load(blocks + _key_at(key + BN, low, length) // BLOCK)
        k = tl.load(source[None, :] + column[:, None], mask=down, other=fill)
        v = tl.load(source[:, None] + kv_stride + column[None, :], mask=across, other=fill)
        if CAUSAL:
            visible = key[None, :] <= position[:, None]
            if WINDOW > 0:
                visible = visible & (key[None, :] > position[:, None] - WINDOW)
        else:
            visible = (key < length)[None, :]
        best, total, acc = softmax_step(queries, k, v, visible, best, total, acc, scale, softcap, SOFTCAP, PRECISION)
    return best, total, acc


@triton.jit
def _prefetch_tile(
    inside, cache, blocks, count, length, shared, block_stride, kv_stride, head_stride,
    QUERIES: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr,
    KEY_BYTES: tl.constexpr,
):  # fmt: skip
    """Brings tile `inside` of a row into the L2 cache while the kernel in front ends."""
    begin, tiles = row_tiles(length, count, shared, QUERIES, BN, WINDOW)
    tiles = tl.maximum(tiles, 1)
    kv_head = inside // tiles
    key = _key_at(begin + (inside - kv_head * tiles) * BN + tl.arange(0, BN), 0, length)
    block = tl.load(blocks + key // BLOCK).to(tl.int64)
    source = cache + kv_head.to(tl.int64) * head_stride + block * block_stride + (key % BLOCK) * D
    prefetch(source, KEY_BYTES)
    prefetch(source + kv_stride, KEY_BYTES)


@triton.jit
def _write(
    out, lse, best, total, acc, token, head, is_query, out_stride,
    HEADS: tl.constexpr, D: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Outputs of the tile's rows, and their log-sum-exps."""
    column = tl.arange(0, acc.shape[1])
    mask = is_query[:, None] & (column < D)[None, :]
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        out + token[:, None] * out_stride + head[:, None] * D + column[None, :],
        result.to(out.dtype.element_ty),
        mask=mask,
    )
    if LSE:
        tl.store(lse + token * HEADS + head, (best + tl.log2(total)) * _LN2, mask=is_query)


@triton.jit
def _slot(program, first_program):
    """Where a program's sums are. It shares at most the head it begins with and the one it ends with."""
    return tl.cast(2 * program + tl.cast(program == first_program, tl.int32), tl.int64)


@triton.jit
def _merged(
    partial, sums, first_program, last_program, m, is_query,
    ROWS: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Adds up what the programs of a row and head have stored, in their order, several loads at a time."""
    column = tl.arange(0, DIM)
    inside = is_query[:, None] & (column < D)[None, :]
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    for program in range(first_program, last_program + 1, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            exists = is_query & (program + i <= last_program)
            slot = _slot(program + i, first_program)
            of_program = sums + slot * (2 * ROWS) + m
            its_best = tl.load(of_program, mask=exists, other=float("-inf"), cache_modifier=".cg")
            its_total = tl.load(of_program + ROWS, mask=exists, other=0.0, cache_modifier=".cg")
            values = tl.load(
                partial + slot * (ROWS * D) + m[:, None] * D + column[None, :],
                mask=inside & (program + i <= last_program), other=0.0, cache_modifier=".cg",
            )  # fmt: skip
            new_best = tl.maximum(best, its_best)
            base = tl.where(new_best == float("-inf"), 0.0, new_best)
            carry, weight = tl.exp2(best - base), tl.exp2(its_best - base)
            total = total * carry + its_total * weight
            acc = acc * carry[:, None] + values * weight[:, None]
            best = new_best
    return best, total, acc


@triton.jit(do_not_specialize=["table_stride"])
def _decode_kernel(
    q, cache, table, starts, lengths, entries, counters, partial, sums, out, lse, shared_out, shared_lse, scale, softcap,
    q_stride, out_stride, table_stride, block_stride, kv_stride, head_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    D: tl.constexpr, DIM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, CAUSAL: tl.constexpr, SHARED: tl.constexpr,
    LSE: tl.constexpr, WORDS: tl.constexpr, KEY_BYTES: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Tiles `share * pid` to `share * (pid + 1) - 1`; row `m` of a tile is query `m // GROUP`, head `m % GROUP`."""
    if PDL:
        gdc_launch_dependents()
    # Entries, tables and lengths are there: the schedule's kernel waits for them, and lets no other begin before it has ended.
    entry = entries + tl.program_id(0) * WORDS
    row, base = tl.load(entry), tl.load(entry + 1)
    start, count, length = tl.load(entry + 2), tl.load(entry + 3), tl.load(entry + 4)
    share, all_tiles, shared = tl.load(entry + 5), tl.load(entry + 6), tl.load(entry + 7)
    tile = tl.program_id(0) * share
    end = tl.minimum(all_tiles, tile + share)
    if PDL:
        if KEY_BYTES != "":
            if tile < end:
                _prefetch_tile(
                    tile - base, cache, table + row.to(tl.int64) * table_stride, count, length, shared, block_stride, kv_stride,
                    head_stride, QUERIES, BLOCK, D, BN, WINDOW, KEY_BYTES,
                )  # fmt: skip
        gdc_wait()
    while tile < end:
        begin, tiles = row_tiles(length, count, shared, QUERIES, BN, WINDOW)
        if tiles > 0:
            kv_head = (tile - base) // tiles
            inside = tile - base - kv_head * tiles
            taken = tl.minimum(tiles - inside, end - tile)
            first = begin + inside * BN
            stop = tl.minimum(length, first + taken * BN)
            m = tl.arange(0, BM)
            query, head = m // GROUP, kv_head * GROUP + m % GROUP
            column = tl.arange(0, DIM)
            is_query = query < count
            token = (start + query).to(tl.int64)
            real = is_query[:, None] & (column < D)[None, :]
            queries = tl.load(q + token[:, None] * q_stride + head[:, None] * D + column[None, :], mask=real, other=0.0)
            best = tl.full([BM], float("-inf"), tl.float32)
            total = tl.zeros([BM], tl.float32)
            acc = tl.zeros([BM, DIM], tl.float32)
            if SHARED:
                # What all rows share is as one key before the row's first.
                is_first = (inside == 0) & (shared > 0)
                place = token * (KV_HEADS * GROUP) + head
                logs = tl.load(shared_lse + place, mask=is_query & is_first, other=float("-inf"))
                best = logs * _LOG2E
                total = tl.where(logs == float("-inf"), 0.0, 1.0)
                acc = tl.load(shared_out + place[:, None] * D + column[None, :], mask=real & is_first, other=0.0)
            low = begin
            if WINDOW > 0:
                low = tl.maximum(0, length - count - WINDOW + 1)
            best, total, acc = _attend(
                queries, best, total, acc, cache + kv_head.to(tl.int64) * head_stride,
                table + row.to(tl.int64) * table_stride, length - count + query, first, stop, low, length,
                scale, softcap, block_stride, kv_stride, BLOCK, D, BN, WINDOW, SOFTCAP, PRECISION, CAUSAL,
            )  # fmt: skip
            if taken == tiles:
                _write(out, lse, best, total, acc, token, head, is_query, out_stride, KV_HEADS * GROUP, D, LSE)
            else:
                of_head = base + kv_head * tiles
                first_program, last_program = of_head // share, (of_head + tiles - 1) // share
                slot = _slot(tl.program_id(0), first_program)
                tl.store(sums + slot * (2 * ROWS) + m, best, mask=is_query)
                tl.store(sums + slot * (2 * ROWS) + ROWS + m, total, mask=is_query)
                tl.store(partial + slot * (ROWS * D) + m[:, None] * D + column[None, :], acc, mask=real)
                # All threads' sums are written before one thread says so.
                tl.debug_barrier()
                arrived = counters + row * KV_HEADS + kv_head
                if tl.atomic_add(arrived, 1, sem="acq_rel") == last_program - first_program:
                    r = tl.arange(0, ROWS)
                    is_row = r // GROUP < count
                    all_best, all_total, all_acc = _merged(
                        partial, sums, first_program, last_program, r, is_row, ROWS, D, DIM, AT_ONCE
                    )
                    _write(
                        out, lse, all_best, all_total, all_acc, (start + r // GROUP).to(tl.int64),
                        kv_head * GROUP + r % GROUP, is_row, out_stride, KV_HEADS * GROUP, D, LSE,
                    )  # fmt: skip
                    tl.store(arrived, 0)
            tile += taken
        if tile == base + tiles * KV_HEADS:
            base = tile
            row += 1
            start = tl.load(starts + row, mask=tile < end, other=0)
            count = tl.load(starts + row + 1, mask=tile < end, other=0) - start
            length = tl.load(lengths + row, mask=tile < end, other=0)


def decode_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    schedule: DecodeSchedule,
    *,
    scale: float,
    softcap: float | None,
    lse: Tensor | None = None,
    shared: tuple[Tensor, Tensor] | None = None,
    causal: bool = True,
) -> None:
    """`attention.prefill_attention` for rows of few queries; rows of more than the schedule's, and empty ones, are left out.

    Args:
        q: `[T, H, d]`.
        kv_cache: `[num_blocks, 2, K, B, d]`.
        block_table: `[R, max_blocks]` int32.
        query_start_loc: `[R + 1]` int32, tokens of `q`; the first need not be 0.
        seq_lens: `[R]` int32.
        out: `[T, H, d]` of any float type, written for the rows' tokens.
        schedule: `decode_schedule` of the same rows.
        scale: factor of the scores.
        softcap: scores become `softcap * tanh(score / softcap)`.
        lse: `[T, H]` fp32, written: natural logarithms of the sums of the scores' exponentials.
        shared: results for the keys that the schedule leaves out, `[T, H, d]` and their `lse`, fp32; they are merged in.
        causal: whether a query sees no keys after itself; otherwise all queries of a row see all its keys.

    Raises:
        ValueError: the schedule is of another shape, or `shared` is missing or too much.
    """
    (tokens, heads, dim), (_, _, kv_heads, block, _) = q.shape, kv_cache.shape
    shape, tiles = schedule.shape, schedule.tiles
    if (shape.heads, shape.kv_heads, shape.dim, shape.dtype) != (heads, kv_heads, dim, q.dtype):
        raise ValueError(f"schedule.shape = {shape}: q is {tuple(q.shape)} {q.dtype}, kv_cache {tuple(kv_cache.shape)}")
    if (shared is not None) != schedule.leaves_shared:
        raise ValueError(f"shared = {shared} with a schedule of leaves_shared = {schedule.leaves_shared}")
    if not tokens:
        return
    rows, programs = triton.next_power_of_2(shape.queries), len(schedule.entries)
    partial = torch.empty(2 * programs, rows, dim, device=q.device, dtype=torch.float32)
    sums = torch.empty(2 * programs, 2, rows, device=q.device, dtype=torch.float32)
    shared_out, shared_lse = shared or (out, out)
    constant = constants(
        shape, tiles, block=block, softcap=softcap is not None, causal=causal,
        shared=shared is not None, lse=lse is not None,
    )  # fmt: skip
    dependent = launch.dependent_launch(q.device)
    _decode_kernel[(programs,)](
        q, kv_cache, block_table, query_start_loc, seq_lens, schedule.entries, schedule.counters, partial, sums,
        out, out if lse is None else lse, shared_out, shared_lse, scale, softcap or 0.0,
        q.stride(0), out.stride(0), block_table.stride(0), *kv_cache.stride()[:3],
        **constant, PDL=dependent, num_warps=tiles.warps, num_stages=tiles.stages,
        **launch.launch_options(dependent),
    )  # fmt: skip


def constants(
    shape: DecodeShape,
    tiles: DecodeTiles,
    *,
    block: int,
    softcap: bool,
    causal: bool,
    shared: bool,
    lse: bool,
) -> dict[str, Any]:
    """The kernel's compile-time arguments but `PDL`."""
    exact = shape.dtype == torch.float32
    padded, rows = max(16, triton.next_power_of_2(shape.dim)), triton.next_power_of_2(shape.queries)
    values = max(1, rows * padded // (32 * tiles.warps))
    # A prefetch takes multiples of 16 bytes.
    key_bytes = "" if shape.dim * shape.dtype.itemsize % 16 else str(shape.dim * shape.dtype.itemsize)
    return {
        "KV_HEADS": shape.kv_heads, "GROUP": shape.heads // shape.kv_heads, "QUERIES": shape.max_query_len, "ROWS": rows,
        "BLOCK": block, "D": shape.dim, "DIM": padded, "BM": shape.tile_queries, "BN": tiles.keys,
        "WINDOW": shape.window or 0, "SOFTCAP": softcap, "PRECISION": "ieee" if exact else "tf32", "CAUSAL": causal,
        "SHARED": shared, "LSE": lse, "WORDS": ENTRY_WORDS, "KEY_BYTES": key_bytes,
        "AT_ONCE": max(1, min(16, _LOADED_VALUES // values)),
    }  # fmt: skip
