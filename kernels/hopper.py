"""Prefill attention for Hopper in Gluon: FlashAttention-3's schedule (Shah et al., 2024, section 3) over the paged cache.

One warp copies keys and values block by block with the tensor memory accelerator; two warp groups multiply, each 64 queries. A warp
group's softmax of one tile runs while the tensor cores compute its next scores and its last product with the values.

Gluon is bound to one release of Triton and has no interpreter: `supports` says where this runs; elsewhere
`attention.prefill_attention` does the same.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from octavo.kernels import launch

_TILE_M = 64
_CONSUMER_REGISTERS = 240
_PRODUCER_REGISTERS = 24


@gluon.jit
def _producer(
    q_desc, kv_desc, out_desc, out, q_s, k_s, v_s, q_full, k_full, k_free, v_full, v_free, table, last_column,
    token, left, head, kv_row, kv_rows, first_tile, num_tiles, position, out_stride, scale, softcap,
    STAGES: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Loads both tiles of queries, then keys and values tile by tile as their places become free."""
    BLOCK: gl.constexpr = kv_desc.block_shape[0]
    BLOCKS: gl.constexpr = BN // BLOCK
    for consumer in gl.static_range(2):
        mbarrier.expect(q_full.index(consumer), BM * D * 2)
        tma.async_copy_global_to_shared(
            q_desc, [token + consumer * BM, head * D], q_full.index(consumer), q_s.index(consumer)
        )
    for i in range(num_tiles):
        stage = i % STAGES
        phase = (i // STAGES) & 1
        column = (first_tile + i) * BLOCKS
        mbarrier.wait(k_free.index(stage), phase ^ 1)
        mbarrier.expect(k_full.index(stage), BN * D * 2)
        for j in gl.static_range(BLOCKS):
            block = gl.load(table + gl.minimum(column + j, last_column))
            tma.async_copy_global_to_shared(
                kv_desc,
                [block * (2 * kv_rows) + kv_row, 0],
                k_full.index(stage),
                k_s.index(stage).slice(j * BLOCK, BLOCK, 0),
            )
        mbarrier.wait(v_free.index(stage), phase ^ 1)
        mbarrier.expect(v_full.index(stage), BN * D * 2)
        for j in gl.static_range(BLOCKS):
            block = gl.load(table + gl.minimum(column + j, last_column))
            tma.async_copy_global_to_shared(
                kv_desc,
                [block * (2 * kv_rows) + kv_rows + kv_row, 0],
                v_full.index(stage),
                v_s.index(stage).slice(j * BLOCK, BLOCK, 0),
            )


@gluon.jit
def _masked(scores, tile, position, key, row, BM: gl.constexpr, BN: gl.constexpr, WINDOW: gl.constexpr):
    """-inf where a query does not see a key; tiles that all queries see whole are left alone."""
    if (tile + 1) * BN > position + 1:
        visible = gl.expand_dims(key + tile * BN, 0) <= gl.expand_dims(row + position, 1)
        scores = gl.where(visible, scores, float("-inf"))
    if WINDOW > 0:
        if tile * BN <= position + BM - 1 - WINDOW:
            near = gl.expand_dims(key + tile * BN, 0) > gl.expand_dims(row + position, 1) - WINDOW
            scores = gl.where(near, scores, float("-inf"))
    return scores


@gluon.jit
def _softmax(scores, best, total, scale, softcap, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr):
    """One step of the online softmax in units of log 2; returns weights, maximum, sum and the factor of what was there before."""
    if SOFTCAP:
        # tanh(u) = 1 - 2 / (exp(2u) + 1); masked scores stay -inf.
        capped = softcap * (1.0 - 2.0 / (gl.exp2(scores * (scale * 2.8853900817779268 / softcap)) + 1.0))
        scores = gl.where(scores == float("-inf"), scores, capped * 1.4426950408889634)
        new_best = gl.maximum(best, gl.max(scores, 1))
        base = new_best
        if WINDOW > 0:
            base = gl.where(new_best == float("-inf"), 0.0, new_best)
        weights = gl.exp2(scores - gl.expand_dims(base, 1))
    else:
        factor = scale * 1.4426950408889634
        new_best = gl.maximum(best, gl.max(scores, 1) * factor)
        base = new_best
        if WINDOW > 0:
            base = gl.where(new_best == float("-inf"), 0.0, new_best)
        weights = gl.exp2(scores * factor - gl.expand_dims(base, 1))
    carry = gl.exp2(best - base)
    return weights, new_best, total * carry + gl.sum(weights, 1), carry


@gluon.jit
def _consumer(
    which: gl.constexpr,
    q_desc, kv_desc, out_desc, out, q_s, k_s, v_s, q_full, k_full, k_free, v_full, v_free, table, last_column,
    token, left, head, kv_row, kv_rows, first_tile, num_tiles, position, out_stride, scale, softcap,
    STAGES: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """64 queries of one head: scores of tile `i` are computed while tile `i - 1` meets its values."""
    dtype: gl.constexpr = kv_desc.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    position += which * BM
    row = gl.arange(0, BM, layout=s_rows)
    key = gl.arange(0, BN, layout=gl.SliceLayout(0, s_layout))
    acc = gl.zeros([BM, D], gl.float32, o_layout)
    best = gl.full([BM], float("-inf"), gl.float32, s_rows)
    total = gl.zeros([BM], gl.float32, s_rows)
    zero = gl.zeros([BM, BN], gl.float32, s_layout)
    mbarrier.wait(q_full.index(which), 0)
    mbarrier.wait(k_full.index(0), 0)
    scores = warpgroup_mma(q_s.index(which), k_s.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(k_free.index(0), count=1)
    scores = _masked(scores, first_tile, position, key, row, BM, BN, WINDOW)
    weights, best, total, carry = _softmax(scores, best, total, scale, softcap, WINDOW, SOFTCAP)
    for i in range(1, num_tiles):
        stage = i % STAGES
        phase = (i // STAGES) & 1
        before = (i - 1) % STAGES
        phase_before = ((i - 1) // STAGES) & 1
        mbarrier.wait(k_full.index(stage), phase)
        next_scores = warpgroup_mma(
            q_s.index(which), k_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        mbarrier.wait(v_full.index(before), phase_before)
        operand = gl.convert_layout(weights.to(dtype), p_layout)
        next_acc = warpgroup_mma(operand, v_s.index(before), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(next_scores,))
        mbarrier.arrive(k_free.index(stage), count=1)
        scores = _masked(scores, first_tile + i, position, key, row, BM, BN, WINDOW)
        weights, best, total, carry = _softmax(scores, best, total, scale, softcap, WINDOW, SOFTCAP)
        acc = warpgroup_mma_wait(0, deps=(next_acc,))
        mbarrier.arrive(v_free.index(before), count=1)
        acc = acc * gl.expand_dims(gl.convert_layout(carry, o_rows), 1)
    last = (num_tiles - 1) % STAGES
    mbarrier.wait(v_full.index(last), ((num_tiles - 1) // STAGES) & 1)
    acc = warpgroup_mma(gl.convert_layout(weights.to(dtype), p_layout), v_s.index(last), acc)
    if WINDOW > 0:
        total = gl.where(total == 0.0, 1.0, total)
    acc = acc / gl.expand_dims(gl.convert_layout(total, o_rows), 1)
    if left >= (which + 1) * BM:
        staged = q_s.index(which)
        staged.store(acc.to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [token + which * BM, head * D], staged)
        tma.store_wait(0)
    else:
        # The tile's end belongs to another sequence.
        out_row = which * BM + gl.arange(0, BM, layout=o_rows)
        column = gl.arange(0, D, layout=gl.SliceLayout(0, o_layout))
        place = gl.expand_dims((token + out_row).to(gl.int64) * out_stride, 1) + gl.expand_dims(head * D + column, 0)
        gl.store(out + place, acc.to(dtype), mask=gl.expand_dims(out_row < left, 1))


@gluon.jit(do_not_specialize=["num_rows", "table_stride"])
def _kernel(
    q_desc, kv_desc, out_desc, out, table, starts, lengths, num_rows, table_stride, out_stride, group, kv_rows, scale, softcap,
    STAGES: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, LEAST: gl.constexpr,
):  # fmt: skip
    """Tile `pid` of all rows' tiles of `2 * BM` queries: row `r` owns those from `starts[r] // (2 * BM) + r` on."""
    BLOCK: gl.constexpr = kv_desc.block_shape[0]
    dtype: gl.constexpr = kv_desc.dtype
    # Late tiles have the most keys: they begin first.
    tile = gl.num_programs(0) - 1 - gl.program_id(0)
    head = gl.program_id(1)
    base = gl.load(starts)
    row = 0
    high = num_rows
    while high - row > 1:
        middle = (row + high) // 2
        first = (gl.load(starts + middle) - base) // (2 * BM) + middle
        row = gl.where(first <= tile, middle, row)
        high = gl.where(first <= tile, high, middle)
    start = gl.load(starts + row)
    count = gl.load(starts + row + 1) - start
    length = gl.load(lengths + row)
    inside = (tile - (start - base) // (2 * BM) - row) * (2 * BM)
    left = count - inside
    if (left <= 0) | (count < LEAST):
        return
    position = length - count + inside
    stop = gl.minimum(length, position + 2 * BM)
    first_tile = 0
    if WINDOW > 0:
        first_tile = gl.maximum(0, position - WINDOW + 1) // BN
    num_tiles = (stop + BN - 1) // BN - first_tile
    last_column = gl.maximum(0, (length + BLOCK - 1) // BLOCK - 1)

    q_s = gl.allocate_shared_memory(dtype, [2, BM, D], q_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, BN, D], kv_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, BN, D], kv_desc.layout)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for consumer in gl.static_range(2):
        mbarrier.init(q_full.index(consumer), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_free.index(stage), count=2)
    kv_row = (head // group) * BLOCK
    blocks = table + row * table_stride
    token = start + inside
    # Compile-time arguments stay that only in a tuple that is written out.
    gl.warp_specialize([
        (_consumer, (
            0, q_desc, kv_desc, out_desc, out, q_s, k_s, v_s, q_full, k_full, k_free, v_full, v_free, blocks, last_column,
            token, left, head, kv_row, kv_rows, first_tile, num_tiles, position, out_stride, scale, softcap,
            STAGES, BM, BN, D, WINDOW, SOFTCAP,
        )),
        (_consumer, (
            1, q_desc, kv_desc, out_desc, out, q_s, k_s, v_s, q_full, k_full, k_free, v_full, v_free, blocks, last_column,
            token, left, head, kv_row, kv_rows, first_tile, num_tiles, position, out_stride, scale, softcap,
            STAGES, BM, BN, D, WINDOW, SOFTCAP,
        )),
        (_producer, (
            q_desc, kv_desc, out_desc, out, q_s, k_s, v_s, q_full, k_full, k_free, v_full, v_free, blocks, last_column,
            token, left, head, kv_row, kv_rows, first_tile, num_tiles, position, out_stride, scale, softcap,
            STAGES, BM, BN, D, WINDOW, SOFTCAP,
        )),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def supports(q: Tensor, block_size: int) -> bool:
    """Whether `prefill_attention` runs for such queries here."""
    return (
        launch.is_hopper(q.device)
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[2] in (64, 128, 256)
        and block_size in (16, 32, 64)
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
) -> None:
    """`attention.prefill_attention` where `supports` says so; all values in the cache must be finite."""
    rows, (_, heads, dim), (_, _, kv_heads, block, _) = block_table.shape[0], q.shape, kv_cache.shape
    dtype = gl.bfloat16 if q.dtype == torch.bfloat16 else gl.float16
    tile_n = 128 if dim <= 128 else 64
    q_layout = gl.NVMMASharedLayout.get_default_for([_TILE_M, dim], dtype)
    kv_layout = gl.NVMMASharedLayout.get_default_for([block, dim], dtype)
    q_desc = TensorDescriptor.from_tensor(q.view(-1, heads * dim), [_TILE_M, dim], q_layout)
    out_desc = TensorDescriptor.from_tensor(out.view(-1, heads * dim), [_TILE_M, dim], q_layout)
    kv_desc = TensorDescriptor.from_tensor(kv_cache.view(-1, dim), [block, dim], kv_layout)
    grid = (triton.cdiv(num_tokens, 2 * _TILE_M) + rows, heads)
    _kernel[grid](
        q_desc, kv_desc, out_desc, out, block_table, query_start_loc, seq_lens, rows, block_table.stride(0), heads * dim,
        heads // kv_heads, kv_heads * block, scale, softcap or 1.0,
        2, _TILE_M, tile_n, dim, window or 0, softcap is not None, _CONSUMER_REGISTERS, _PRODUCER_REGISTERS,
        min_query_len, num_warps=4,
    )  # fmt: skip
