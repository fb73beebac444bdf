"""Prefill attention for Hopper in Gluon: FlashAttention-3's schedule (Shah et al., 2024, section 3) over the paged cache.

The grid is as large as the device; its programs go through the step's tiles, longest first (`prefill_plan`), forwards and
backwards in turn. In a program one warp copies queries, keys and values with the tensor memory accelerator, ahead across the
tiles' borders; each of two or three warp groups multiplies 64 queries. A warp group's softmax of one tile of keys runs while the
tensor cores compute its next scores and its last product with the values; with `ping_pong` the groups issue their products in
turn, so that the softmax of one meets the products of the other. Keys are taken from the last to the first: only the first tiles,
and those at a window's far end, are masked. A finished tile leaves through shared memory while the next one is computed.

Gluon is bound to one release of Triton and has no interpreter: `supports` says where this runs; elsewhere
`attention.prefill_attention` does the same.
"""

from __future__ import annotations

from dataclasses import dataclass

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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels import launch
from octavo.kernels.prefill_plan import PrefillPlan, prefill_plan

_GROUP_QUERIES = 64
_LOG2E = gl.constexpr(1.4426950408889634)
_LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _rounds(plan, HEADS: gl.constexpr):
    """How many items, a tile and a head each, this program does."""
    programs = gl.num_programs(0)
    items = gl.load(plan) * HEADS
    whole = items // programs
    turn = gl.where(whole % 2 == 1, programs - 1 - gl.program_id(0), gl.program_id(0))
    return whole + (turn < items % programs).to(gl.int32)


@gluon.jit
def _item(plan, k, HEADS: gl.constexpr):
    """Row, first token, queries, first position and head of the program's item `k`."""
    programs = gl.num_programs(0)
    item = k * programs + gl.where(k % 2 == 1, programs - 1 - gl.program_id(0), gl.program_id(0))
    entry = plan + 4 + item // HEADS * 4
    return gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 3), item % HEADS


@gluon.jit
def _span(queries, position, BN: gl.constexpr, WINDOW: gl.constexpr):
    """The first and the last tile of keys that so many queries see."""
    first = 0
    if WINDOW > 0:
        first = gl.maximum(0, position - WINDOW + 1) // BN
    return first, (position + queries - 1) // BN


@gluon.jit
def _copy_keys(kv_desc, shared, full, table, column, last_column, source, BN: gl.constexpr):
    """Begins the copies of a tile's blocks, keys or values by `source`; blocks after the row's last one are that one again."""
    BLOCK: gl.constexpr = kv_desc.block_shape[0]
    BLOCKS: gl.constexpr = BN // BLOCK
    mbarrier.expect(full, BN * kv_desc.block_shape[1] * 2)
    for j in gl.static_range(BLOCKS):
        block = gl.load(table + gl.minimum(column + j, last_column))
        tma.async_copy_global_to_shared(
            kv_desc, [block * source[0] + source[1], 0], full, shared.slice(j * BLOCK, BLOCK, 0)
        )


@gluon.jit
def _producer(
    q_desc, kv_desc, table, plan, q_s, k_s, v_s, q_full, q_free, k_full, k_free, v_full, v_free,
    group, kv_rows, table_stride,
    HEADS: gl.constexpr, PACK: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, WINDOW: gl.constexpr, Q_BUFFERS: gl.constexpr,
):  # fmt: skip
    """Loads an item's first keys, its queries, then keys and values tile by tile as their places become free."""
    BLOCK: gl.constexpr = kv_desc.block_shape[0]
    BLOCKS: gl.constexpr = BN // BLOCK
    QUERIES: gl.constexpr = BM // PACK
    fill = 0
    for k in range(_rounds(plan, HEADS)):
        row, token, queries, position, head = _item(plan, k, HEADS)
        first, top = _span(queries, position, BN, WINDOW)
        last_column = (position + queries - 1) // BLOCK
        blocks = table + row.to(gl.int64) * table_stride
        kv_row = head * PACK // group * BLOCK
        for i in range(top - first + 1):
            stage = fill % STAGES
            free = ((fill // STAGES) & 1) ^ 1
            column = (top - i) * BLOCKS
            mbarrier.wait(k_free.index(stage), free)
            _copy_keys(
                kv_desc, k_s.index(stage), k_full.index(stage), blocks, column, last_column, (2 * kv_rows, kv_row), BN
            )
            if i == 0:
                for consumer in gl.static_range(CONSUMERS):
                    place = k % Q_BUFFERS * CONSUMERS + consumer
                    mbarrier.wait(q_free.index(place), ((k // Q_BUFFERS) & 1) ^ 1)
                    mbarrier.expect(q_full.index(place), BM * D * 2)
                    tma.async_copy_global_to_shared(
                        q_desc, [token + consumer * QUERIES, head * PACK, 0], q_full.index(place), q_s.index(place)
                    )
            mbarrier.wait(v_free.index(stage), free)
            _copy_keys(
                kv_desc, v_s.index(stage), v_full.index(stage), blocks, column, last_column,
                (2 * kv_rows, kv_rows + kv_row), BN,
            )  # fmt: skip
            fill += 1


@gluon.jit
def _tanh(x):
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _softmax(
    scores, best, total, tile, position, row, key, scale, softcap,
    BN: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """One step of the online softmax in units of log 2; returns weights, maximum, sum and the factor of what was there before."""
    factor = scale * _LOG2E
    if SOFTCAP:
        scores = _tanh(scores * (scale / softcap))
        factor = softcap * _LOG2E
    if MASKED:
        ahead = gl.expand_dims(key + tile * BN, 0) - gl.expand_dims(row + position, 1)
        visible = ahead <= 0
        if WINDOW > 0:
            visible = visible & (ahead > -WINDOW)
        scores = gl.where(visible, scores, float("-inf"))
    new_best = gl.maximum(best, gl.max(scores, 1) * factor)
    base = new_best
    if MASKED:
        # Queries that have seen no key so far keep weight 0 instead of exp(-inf + inf).
        base = gl.where(new_best == float("-inf"), 0.0, new_best)
    weights = gl.exp2(scores * factor - gl.expand_dims(base, 1))
    carry = gl.exp2(best - base)
    return weights, new_best, total * carry + gl.sum(weights, 1), carry


@gluon.jit
def _begin_turn(turns, which: gl.constexpr, fill, PING_PONG: gl.constexpr):
    """Waits until the group before this one has issued its products: of this fill, or the last group's of the fill before."""
    if PING_PONG:
        mbarrier.wait(turns.index(which), (fill & 1) ^ (which == 0))


@gluon.jit
def _end_turn(turns, which: gl.constexpr, CONSUMERS: gl.constexpr, PING_PONG: gl.constexpr):
    if PING_PONG:
        mbarrier.arrive(turns.index((which + 1) % CONSUMERS), count=1)


@gluon.jit
def _pass(
    which: gl.constexpr, k_full, k_free, v_full, v_free, turns, fill, count,
    STAGES: gl.constexpr, CONSUMERS: gl.constexpr, PING_PONG: gl.constexpr,
):  # fmt: skip
    """Frees tiles of keys that only other groups' queries see."""
    for f in range(fill, fill + count):
        stage = f % STAGES
        phase = (f // STAGES) & 1
        mbarrier.wait(k_full.index(stage), phase)
        _begin_turn(turns, which, f, PING_PONG)
        _end_turn(turns, which, CONSUMERS, PING_PONG)
        mbarrier.arrive(k_free.index(stage), count=1)
        mbarrier.wait(v_full.index(stage), phase)
        mbarrier.arrive(v_free.index(stage), count=1)


@gluon.jit
def _step(
    which: gl.constexpr, q_tile, k_s, v_s, k_full, k_free, v_full, v_free, turns, operand, best, total, acc,
    fill, tile, position, row, key, scale, softcap,
    STAGES: gl.constexpr, CONSUMERS: gl.constexpr, BN: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    PING_PONG: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Scores of this fill's keys, while the weights of the fill before meet their values."""
    s_layout: gl.constexpr = key.type.layout.parent
    BM: gl.constexpr = acc.shape[0]
    o_rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    stage = fill % STAGES
    before = (fill - 1) % STAGES
    mbarrier.wait(k_full.index(stage), (fill // STAGES) & 1)
    _begin_turn(turns, which, fill, PING_PONG)
    zero = gl.zeros([BM, BN], gl.float32, s_layout)
    next_scores = warpgroup_mma(q_tile, k_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), ((fill - 1) // STAGES) & 1)
    next_acc = warpgroup_mma(operand, v_s.index(before), acc, is_async=True)
    _end_turn(turns, which, CONSUMERS, PING_PONG)
    scores = warpgroup_mma_wait(1, deps=(next_scores,))
    mbarrier.arrive(k_free.index(stage), count=1)
    weights, best, total, carry = _softmax(
        scores, best, total, tile, position, row, key, scale, softcap, BN, WINDOW, SOFTCAP, MASKED
    )
    acc = warpgroup_mma_wait(0, deps=(next_acc,))
    mbarrier.arrive(v_free.index(before), count=1)
    acc = acc * gl.expand_dims(gl.convert_layout(carry, o_rows), 1)
    operand = gl.convert_layout(weights.to(operand.dtype), operand.type.layout)
    return operand, best, total, acc


@gluon.jit
def _write(
    acc, staged, out_desc, out, token, queries, head, out_stride,
    BM: gl.constexpr, D: gl.constexpr, DIM: gl.constexpr, PACK: gl.constexpr,
):  # fmt: skip
    """Begins the copy of whole tiles to memory; writes what must not touch its neighbours element by element."""
    values = acc.to(out.dtype.element_ty)
    if queries >= BM // PACK:
        # What was staged before has left.
        tma.store_wait(0)
        gl.thread_barrier()
        staged.reshape([BM, D]).store(values)
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(out_desc, [token, head * PACK, 0], staged)
    else:
        out_row = gl.arange(0, BM, layout=gl.SliceLayout(1, acc.type.layout))
        column = gl.arange(0, D, layout=gl.SliceLayout(0, acc.type.layout))
        start = (token + out_row // PACK).to(gl.int64) * out_stride + (head * PACK + out_row % PACK) * DIM
        mask = gl.expand_dims(out_row < queries * PACK, 1) & gl.expand_dims(column < DIM, 0)
        gl.store(out + gl.expand_dims(start, 1) + gl.expand_dims(column, 0), values, mask=mask)


@gluon.jit
def _attend(
    which: gl.constexpr, q_tile, staged, k_s, v_s, q_free, k_full, k_free, v_full, v_free, turns,
    out_desc, out, lse, sinks, fill, first, top, token, queries, position, head, out_stride, scale, softcap,
    HEADS: gl.constexpr, PACK: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, BM: gl.constexpr,
    BN: gl.constexpr, D: gl.constexpr, DIM: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    LSE: gl.constexpr, SINKS: gl.constexpr, PING_PONG: gl.constexpr, OUT_IN_Q: gl.constexpr,
):  # fmt: skip
    """`BM // PACK` queries of `PACK` heads, or those of them that there are: tiles `top` to `first`; `top` is number `fill`."""
    QUERIES: gl.constexpr = BM // PACK
    dtype: gl.constexpr = k_s.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    # Row `r` of the products is head `r % PACK` of query `r // PACK`.
    place = gl.arange(0, BM, layout=s_rows)
    row = place // PACK
    key = gl.arange(0, BN, layout=gl.SliceLayout(0, s_layout))
    acc = gl.zeros([BM, D], gl.float32, o_layout)
    best = gl.full([BM], float("-inf"), gl.float32, s_rows)
    total = gl.zeros([BM], gl.float32, s_rows)
    if SINKS:
        best = gl.load(sinks + head * PACK + place % PACK).to(gl.float32) * _LOG2E
        total += 1.0
    low, high = _span(gl.minimum(queries, QUERIES), position, BN, WINDOW)
    _pass(which, k_full, k_free, v_full, v_free, turns, fill, top - high, STAGES, CONSUMERS, PING_PONG)
    fill += top - high
    stage = fill % STAGES
    mbarrier.wait(k_full.index(stage), (fill // STAGES) & 1)
    _begin_turn(turns, which, fill, PING_PONG)
    zero = gl.zeros([BM, BN], gl.float32, s_layout)
    next_scores = warpgroup_mma(q_tile, k_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    _end_turn(turns, which, CONSUMERS, PING_PONG)
    scores = warpgroup_mma_wait(0, deps=(next_scores,))
    mbarrier.arrive(k_free.index(stage), count=1)
    weights, best, total, _ = _softmax(
        scores, best, total, high, position, row, key, scale, softcap, BN, WINDOW, SOFTCAP, True
    )
    operand = gl.convert_layout(weights.to(dtype), p_layout)
    # Tiles below `seen` come before all queries' positions; those from `near` on are in all queries' windows.
    seen = gl.maximum(low, gl.minimum(high, (position + 1) // BN))
    near = low
    if WINDOW > 0:
        near = gl.maximum(low, gl.minimum(seen, (position + QUERIES - 1 - WINDOW) // BN + 1))
    for tile in range(high - 1, seen - 1, -1):
        fill += 1
        operand, best, total, acc = _step(
            which, q_tile, k_s, v_s, k_full, k_free, v_full, v_free, turns, operand, best, total, acc,
            fill, tile, position, row, key, scale, softcap,
            STAGES, CONSUMERS, BN, WINDOW, SOFTCAP, PING_PONG, True,
        )  # fmt: skip
    for tile in range(seen - 1, near - 1, -1):
        fill += 1
        operand, best, total, acc = _step(
            which, q_tile, k_s, v_s, k_full, k_free, v_full, v_free, turns, operand, best, total, acc,
            fill, tile, position, row, key, scale, softcap,
            STAGES, CONSUMERS, BN, WINDOW, SOFTCAP, PING_PONG, False,
        )  # fmt: skip
    if WINDOW > 0:
        for tile in range(near - 1, low - 1, -1):
            fill += 1
            operand, best, total, acc = _step(
                which, q_tile, k_s, v_s, k_full, k_free, v_full, v_free, turns, operand, best, total, acc,
                fill, tile, position, row, key, scale, softcap,
                STAGES, CONSUMERS, BN, WINDOW, SOFTCAP, PING_PONG, True,
            )  # fmt: skip
    if not OUT_IN_Q:
        # All scores are there: the next queries may come while the rest is done.
        mbarrier.arrive(q_free, count=1)
    stage = fill % STAGES
    mbarrier.wait(v_full.index(stage), (fill // STAGES) & 1)
    acc = warpgroup_mma(operand, v_s.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_free.index(stage), count=1)
    _pass(which, k_full, k_free, v_full, v_free, turns, fill + 1, low - first, STAGES, CONSUMERS, PING_PONG)
    if LSE:
        entry = (token + row).to(gl.int64) * (HEADS * PACK) + head * PACK + place % PACK
        gl.store(lse + entry, (best + gl.log2(total)) * _LN2, mask=row < queries)
    acc = acc * gl.expand_dims(gl.convert_layout(1.0 / total, o_rows), 1)
    _write(acc, staged, out_desc, out, token, queries, head, out_stride, BM, D, DIM, PACK)
    if OUT_IN_Q:
        tma.store_wait(0)
        mbarrier.arrive(q_free, count=1)


@gluon.jit
def _consumer(
    which: gl.constexpr,
    out_desc, out, lse, sinks, plan, q_s, out_s, k_s, v_s,
    q_full, q_free, k_full, k_free, v_full, v_free, turns, out_stride, scale, softcap,
    HEADS: gl.constexpr, PACK: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, DIM: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    LSE: gl.constexpr, SINKS: gl.constexpr, Q_BUFFERS: gl.constexpr, PING_PONG: gl.constexpr, OUT_IN_Q: gl.constexpr,
):  # fmt: skip
    """The queries from `which * BM // PACK` on, `BM // PACK` of them, of each of the program's tiles."""
    QUERIES: gl.constexpr = BM // PACK
    fill = 0
    for k in range(_rounds(plan, HEADS)):
        _, token, queries, position, head = _item(plan, k, HEADS)
        first, top = _span(queries, position, BN, WINDOW)
        place = k % Q_BUFFERS * CONSUMERS + which
        q_tile = q_s.index(place)
        if OUT_IN_Q:
            staged = q_tile
        else:
            staged = out_s.index(which)
        mine = queries - which * QUERIES
        mbarrier.wait(q_full.index(place), (k // Q_BUFFERS) & 1)
        if mine > 0:
            _attend(
                which, q_tile.reshape([BM, D]), staged, k_s, v_s, q_free.index(place), k_full, k_free, v_full, v_free, turns,
                out_desc, out, lse, sinks, fill, first, top, token + which * QUERIES, mine, position + which * QUERIES, head,
                out_stride, scale, softcap,
                HEADS, PACK, STAGES, CONSUMERS, BM, BN, D, DIM, WINDOW, SOFTCAP, LSE, SINKS, PING_PONG, OUT_IN_Q,
            )  # fmt: skip
        else:
            mbarrier.arrive(q_free.index(place), count=1)
            _pass(which, k_full, k_free, v_full, v_free, turns, fill, top - first + 1, STAGES, CONSUMERS, PING_PONG)
        fill += top - first + 1
    # Shared memory must outlive what is copied out of it.
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["group", "table_stride"])
def _kernel(
    q_desc, kv_desc, out_desc, out, lse, sinks, table, plan, group, kv_rows, table_stride, out_stride, scale, softcap,
    HEADS: gl.constexpr, PACK: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, DIM: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    LSE: gl.constexpr, SINKS: gl.constexpr, Q_BUFFERS: gl.constexpr, PING_PONG: gl.constexpr, OUT_IN_Q: gl.constexpr,
    PDL: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Items `_item(plan, k, HEADS)` for all `k` below `_rounds(plan, HEADS)`."""
    D: gl.constexpr = kv_desc.block_shape[1]
    dtype: gl.constexpr = kv_desc.dtype
    q_s = gl.allocate_shared_memory(dtype, [Q_BUFFERS * CONSUMERS, BM // PACK, PACK, D], q_desc.layout)
    out_s = q_s
    if not OUT_IN_Q:
        out_s = gl.allocate_shared_memory(dtype, [CONSUMERS, BM // PACK, PACK, D], q_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, BN, D], kv_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, BN, D], kv_desc.layout)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [Q_BUFFERS * CONSUMERS, 1], barrier)
    q_free = gl.allocate_shared_memory(gl.int64, [Q_BUFFERS * CONSUMERS, 1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    turns = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], barrier)
    for place in gl.static_range(Q_BUFFERS * CONSUMERS):
        mbarrier.init(q_full.index(place), count=1)
        mbarrier.init(q_free.index(place), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=CONSUMERS)
        mbarrier.init(v_free.index(stage), count=CONSUMERS)
    for consumer in gl.static_range(CONSUMERS):
        mbarrier.init(turns.index(consumer), count=1)
    fence_async_shared()
    gl.thread_barrier()
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    # Compile-time arguments stay that only in a tuple that is written out.
    if CONSUMERS == 3:
        gl.warp_specialize([
            (_consumer, (
                0,
                out_desc, out, lse, sinks, plan, q_s, out_s, k_s, v_s,
                q_full, q_free, k_full, k_free, v_full, v_free, turns, out_stride, scale, softcap,
                HEADS, PACK, STAGES, CONSUMERS, BM, BN, D, DIM, WINDOW, SOFTCAP, LSE, SINKS, Q_BUFFERS, PING_PONG, OUT_IN_Q,
            )),
            (_consumer, (
                1,
                out_desc, out, lse, sinks, plan, q_s, out_s, k_s, v_s,
                q_full, q_free, k_full, k_free, v_full, v_free, turns, out_stride, scale, softcap,
                HEADS, PACK, STAGES, CONSUMERS, BM, BN, D, DIM, WINDOW, SOFTCAP, LSE, SINKS, Q_BUFFERS, PING_PONG, OUT_IN_Q,
            )),
            (_consumer, (
                2,
                out_desc, out, lse, sinks, plan, q_s, out_s, k_s, v_s,
                q_full, q_free, k_full, k_free, v_full, v_free, turns, out_stride, scale, softcap,
                HEADS, PACK, STAGES, CONSUMERS, BM, BN, D, DIM, WINDOW, SOFTCAP, LSE, SINKS, Q_BUFFERS, PING_PONG, OUT_IN_Q,
            )),
            (_producer, (
                q_desc, kv_desc, table, plan, q_s, k_s, v_s, q_full, q_free, k_full, k_free, v_full, v_free,
                group, kv_rows, table_stride, HEADS, PACK, STAGES, CONSUMERS, BM, BN, D, WINDOW, Q_BUFFERS,
            )),
        ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consumer, (
                0,
                out_desc, out, lse, sinks, plan, q_s, out_s, k_s, v_s,
                q_full, q_free, k_full, k_free, v_full, v_free, turns, out_stride, scale, softcap,
                HEADS, PACK, STAGES, CONSUMERS, BM, BN, D, DIM, WINDOW, SOFTCAP, LSE, SINKS, Q_BUFFERS, PING_PONG, OUT_IN_Q,
            )),
            (_consumer, (
                1,
                out_desc, out, lse, sinks, plan, q_s, out_s, k_s, v_s,
                q_full, q_free, k_full, k_free, v_full, v_free, turns, out_stride, scale, softcap,
                HEADS, PACK, STAGES, CONSUMERS, BM, BN, D, DIM, WINDOW, SOFTCAP, LSE, SINKS, Q_BUFFERS, PING_PONG, OUT_IN_Q,
            )),
            (_producer, (
                q_desc, kv_desc, table, plan, q_s, k_s, v_s, q_full, q_free, k_full, k_free, v_full, v_free,
                group, kv_rows, table_stride, HEADS, PACK, STAGES, CONSUMERS, BM, BN, D, WINDOW, Q_BUFFERS,
            )),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


@dataclass(frozen=True, slots=True)
class HopperTiles:
    """How prefill attention is cut; ranked by `python -m benches.gpu.prefill --tune`."""

    keys: int
    """Keys of a tile."""
    stages: int
    """Tiles of keys, and of values, that are in shared memory or on the way."""
    groups: int
    """Warp groups that multiply, 64 queries each: 2 or 3."""
    q_buffers: int
    """Tiles of queries in shared memory or on the way."""
    ping_pong: bool
    """Whether the groups issue their products in turn."""
    out_in_q: bool
    """Whether outputs leave through the queries' place instead of one of their own."""

    @property
    def rows(self) -> int:
        """Of a tile's products, all groups' together: queries, each as often as heads share the tile."""
        return _GROUP_QUERIES * self.groups

    @property
    def registers(self) -> tuple[int, int]:
        """Of each thread of a multiplying and of the copying warp group; a multiprocessor has 65,536."""
        return (240, 32) if self.groups == 2 else (160, 32)


def tiles_for(dim: int) -> HopperTiles:
    """The fastest cut for a head's size."""
    if dim <= 64:
        return HopperTiles(keys=128, stages=3, groups=3, q_buffers=2, ping_pong=True, out_in_q=False)
    if dim <= 128:
        return HopperTiles(keys=128, stages=2, groups=2, q_buffers=1, ping_pong=True, out_in_q=False)
    return HopperTiles(keys=64, stages=2, groups=2, q_buffers=1, ping_pong=True, out_in_q=True)


def supports(q: Tensor, block_size: int) -> bool:
    """Whether `prefill_attention` runs for such queries here."""
    return (
        launch.is_hopper(q.device)
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[2] in (64, 80, 96, 128, 256)
        and block_size in (16, 32, 64)
    )


def tile_queries(heads: int, kv_heads: int, dim: int, *, few: bool = False, tiles: HopperTiles | None = None) -> int:
    """Queries of a tile of the plan.

    With `few`, for rows of fewer queries than a tile has rows, the heads that read the same keys share a tile: it then has so many
    times fewer queries, and the products are the same. For long rows that is slower.
    """
    group, rows = heads // kv_heads, (tiles or tiles_for(dim)).rows
    return rows // group if few and _GROUP_QUERIES % group == 0 else rows


def _descriptor(tensor: Tensor, shape: list[int], box: list[int]) -> TensorDescriptor:
    """Of boxes of a contiguous tensor seen as `shape`; what a box has beyond it reads as 0 and is not written."""
    dtype = gl.bfloat16 if tensor.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for(box, dtype)
    return TensorDescriptor.from_tensor(tensor.view(shape), box, layout)


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
    lse: Tensor | None = None,
    sinks: Tensor | None = None,
    plan: PrefillPlan | None = None,
    tiles: HopperTiles | None = None,
) -> None:
    """`attention.prefill_attention` where `supports` says so; all values in the cache must be finite, and `scale` positive.

    Args:
        plan: `prefill_plan` of the same rows and `min_query_len` with tiles of `tile_queries`, `few` or not; made here if there is
            none.
        tiles: the cut, instead of `tiles_for(d)`.

    Raises:
        ValueError: the plan's tiles are of another size.
    """
    (_, heads, dim), (_, _, kv_heads, block, _) = q.shape, kv_cache.shape
    tiles = tiles or tiles_for(dim)
    if plan is None:
        plan = prefill_plan(query_start_loc, seq_lens, num_tokens, tile=tiles.rows, min_query_len=min_query_len)
    fitting = {tile_queries(heads, kv_heads, dim, few=few, tiles=tiles) for few in (False, True)}
    if plan.tile not in fitting:
        raise ValueError(f"plan.tile = {plan.tile}: {tiles} needs {' or '.join(map(str, sorted(fitting)))}")
    pack = tiles.rows // plan.tile
    width = max(64, triton.next_power_of_2(dim))
    programs = min(launch.multiprocessors(q.device), (plan.entries.shape[0] - 1) * heads // pack)
    dependent = launch.dependent_launch(q.device)
    box = [_GROUP_QUERIES // pack, pack, width]
    _kernel[(programs,)](
        _descriptor(q, [-1, heads, dim], box), _descriptor(kv_cache, [-1, dim], [block, width]),
        _descriptor(out, [-1, heads, dim], box), out,
        out if lse is None else lse, out if sinks is None else sinks, block_table, plan.entries,
        heads // kv_heads, kv_heads * block, block_table.stride(0), heads * dim, scale, softcap or 1.0,
        heads // pack, pack, tiles.stages, tiles.groups, _GROUP_QUERIES, tiles.keys, dim, window or 0,
        softcap is not None, lse is not None, sinks is not None, tiles.q_buffers, tiles.ping_pong, tiles.out_in_q, dependent,
        *tiles.registers, num_warps=4, **launch.launch_options(dependent),
    )  # fmt: skip
