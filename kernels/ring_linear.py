"""Matrix products of up to a few hundred rows for Hopper, in Gluon: a ring of stages that the tensor memory accelerator fills.

The work, all columns of all tiles in one line, is cut into as many equal runs as there are programs (Stream-K: Osama et al., 2023),
so that no multiprocessor waits for another however few tiles there are. The ring runs across the tiles' borders: while one tile's
outputs are written the next one's weights arrive. A tile's sums of several programs are added in the order of its columns by the
program that arrives last: results do not depend on timing. Weights are the left operand (`yᵀ = W · xᵀ`): their rows fill the 64 of
a `wgmma`.

Gluon is bound to one release of Triton and has no interpreter: `supports` says where this runs.
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels import launch
from octavo.kernels.tiles import RingTiles


@gluon.jit
def _load_weights(w_desc, w_s, full, unit, stage, wanted, blocks, tiles_m, up_row, PARTS: gl.constexpr):
    """Begins the copy of a unit's weights, all parts, if `wanted`."""
    BR: gl.constexpr = w_desc.block_shape[0]
    BK: gl.constexpr = w_desc.block_shape[1]
    k = unit % blocks * BK
    tile = unit // blocks // tiles_m
    for part in gl.static_range(PARTS):
        # `up_row` is how far the second half is away; 0 where both parts are neighbours.
        row = gl.where(up_row > 0, tile * BR + part * up_row, (tile * PARTS + part) * BR)
        tma.async_copy_global_to_shared(
            w_desc, [row, k], full.index(stage), w_s.index(stage * PARTS + part), pred=wanted
        )


@gluon.jit
def _load_rows(x_desc, x_s, full, unit, stage, wanted, blocks, tiles_m):
    """Begins the copy of a unit's rows of `x`, if `wanted`."""
    BM: gl.constexpr = x_desc.block_shape[0]
    BK: gl.constexpr = x_desc.block_shape[1]
    tma.async_copy_global_to_shared(
        x_desc,
        [unit // blocks % tiles_m * BM, unit % blocks * BK],
        full.index(stage),
        x_s.index(stage),
        pred=wanted,
    )


@gluon.jit
def _total(partial, place, head, tail, SIZE: gl.constexpr):
    """Adds up the sums of the programs `head` to `tail`, in their order."""
    PER_THREAD: gl.constexpr = place.shape[0] * place.shape[1] // (32 * gl.num_warps())
    # Several loads at once hide each other's latency, as far as registers reach.
    AT_ONCE: gl.constexpr = 4 if PER_THREAD <= 16 else 2 if PER_THREAD <= 32 else 1
    total = gl.load(partial + (2 * head + 1) * SIZE + place, cache_modifier=".cg")
    for program in range(head + 1, tail + 1, AT_ONCE):
        for i in gl.static_range(AT_ONCE):
            sums = partial + 2 * (program + i) * SIZE
            total += gl.load(sums + place, mask=program + i <= tail, other=0.0, cache_modifier=".cg")
    return total


@gluon.jit
def _activate(gate, up, SILU: gl.constexpr):
    """`act(gate) * up` in fp32: SiLU, or GELU with `tanh(u) = 2 sigmoid(2u) - 1`."""
    argument = gate
    if not SILU:
        argument = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + gl.exp2(argument * -1.4426950408889634)) * up


@gluon.jit
def _store(acc, y, bias, first, m, rows, width, BIAS: gl.constexpr):
    """Writes outputs `first + i` of the rows `m`, those that exist."""
    BR: gl.constexpr = acc.shape[0]
    out_row = first + gl.arange(0, BR, layout=gl.SliceLayout(1, acc.type.layout))
    if BIAS:
        acc += gl.expand_dims(gl.load(bias + out_row, mask=out_row < width, other=0.0).to(gl.float32), 1)
    target = gl.expand_dims(m * width, 0) + gl.expand_dims(out_row, 1)
    mask = gl.expand_dims(m < rows, 0) & gl.expand_dims(out_row < width, 1)
    gl.store(y + target, acc.to(y.dtype.element_ty), mask=mask)


@gluon.jit(do_not_specialize=["rows", "width", "blocks", "tiles_m", "units", "up_row"])
def _ring_kernel(
    w_desc, x_desc, y, bias, partial, counters, rows, width, blocks, tiles_m, units, up_row,
    PARTS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, SILU: gl.constexpr, BIAS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Units `[units * pid // programs, units * (pid + 1) // programs)`; unit `u` is block `u % blocks` of tile `u // blocks`."""
    BR: gl.constexpr = w_desc.block_shape[0]
    BK: gl.constexpr = w_desc.block_shape[1]
    BM: gl.constexpr = x_desc.block_shape[0]
    BYTES: gl.constexpr = 2 * BK * (PARTS * BR + BM)
    SIZE: gl.constexpr = PARTS * BR * BM
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, BM, 16]
    )
    dtype: gl.constexpr = w_desc.dtype
    w_s = gl.allocate_shared_memory(dtype, [STAGES * PARTS, BR, BK], w_desc.layout)
    x_s = gl.allocate_shared_memory(dtype, [STAGES, BM, BK], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    programs = gl.num_programs(0)
    begin = units * gl.program_id(0) // programs
    stop = units * (gl.program_id(0) + 1) // programs
    if PDL:
        gdc_launch_dependents()
    for i in gl.static_range(STAGES):
        wanted = begin + i < stop
        mbarrier.expect(full.index(i), BYTES, pred=wanted)
        _load_weights(w_desc, w_s, full, begin + i, i, wanted, blocks, tiles_m, up_row, PARTS)
    if PDL:
        gdc_wait()
    for i in gl.static_range(STAGES):
        _load_rows(x_desc, x_s, full, begin + i, i, begin + i < stop, blocks, tiles_m)

    place = gl.expand_dims(gl.arange(0, BR, layout=gl.SliceLayout(1, layout)), 1) * BM + gl.expand_dims(
        gl.arange(0, BM, layout=gl.SliceLayout(0, layout)), 0
    )
    for tile in range(begin // blocks, (stop - 1) // blocks + 1):
        # The programs that have the tile's first and last block.
        head = ((tile * blocks + 1) * programs - 1) // units
        tail = ((tile + 1) * blocks * programs - 1) // units
        acc = gl.zeros([BR, BM], gl.float32, layout)
        second = acc
        for unit in range(gl.maximum(begin, tile * blocks), gl.minimum(stop, (tile + 1) * blocks)):
            turn = unit - begin
            stage = turn % STAGES
            mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
            operand = x_s.index(stage).permute((1, 0))
            acc = warpgroup_mma(w_s.index(stage * PARTS), operand, acc, is_async=True)
            if PARTS == 2:
                second = warpgroup_mma(w_s.index(stage * PARTS + 1), operand, second, is_async=True)
                acc, second = warpgroup_mma_wait(2, deps=(acc, second))
            else:
                acc = warpgroup_mma_wait(1, deps=(acc,))
            # The unit before this one is multiplied: its stage is free once all warps say so.
            gl.thread_barrier()
            free = (turn + STAGES - 1) % STAGES
            coming = unit + STAGES - 1
            wanted = (turn > 0) & (coming < stop)
            mbarrier.expect(full.index(free), BYTES, pred=wanted)
            _load_weights(w_desc, w_s, full, coming, free, wanted, blocks, tiles_m, up_row, PARTS)
            _load_rows(x_desc, x_s, full, coming, free, wanted, blocks, tiles_m)
        if PARTS == 2:
            acc, second = warpgroup_mma_wait(0, deps=(acc, second))
        else:
            acc = warpgroup_mma_wait(0, deps=(acc,))
        last = True
        if tail > head:
            # A program has at most two tiles that are not its own: what it begins with, and what it ends with.
            mine = partial + (2 * gl.program_id(0) + (gl.program_id(0) == head).to(gl.int32)) * SIZE
            gl.store(mine + place, acc)
            if PARTS == 2:
                gl.store(mine + BR * BM + place, second)
            # All threads' sums are written before one thread says so.
            gl.thread_barrier()
            last = gl.atomic_add(counters + tile, 1, sem="acq_rel") == tail - head
            if last:
                acc = _total(partial, place, head, tail, SIZE)
                if PARTS == 2:
                    second = _total(partial + BR * BM, place, head, tail, SIZE)
                gl.store(counters + tile, 0)
        if last:
            m = tile % tiles_m * BM + gl.arange(0, BM, layout=gl.SliceLayout(0, layout))
            if GATED:
                _store(_activate(acc, second, SILU), y, bias, tile // tiles_m * BR, m, rows, width, BIAS)
            else:
                _store(acc, y, bias, tile // tiles_m * PARTS * BR, m, rows, width, BIAS)
                if PARTS == 2:
                    _store(second, y, bias, (tile // tiles_m * PARTS + 1) * BR, m, rows, width, BIAS)


def supports(x: Tensor, weight: Tensor) -> bool:
    """Whether `ring_linear` runs for such a product here: Hopper, and rows that start at multiples of 16 bytes."""
    return (
        launch.is_hopper(x.device)
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.shape[1] % 8 == 0
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and weight.data_ptr() % 16 == 0
    )


def descriptor(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Of boxes `[rows, columns]` of a matrix; what a box has beyond the matrix reads as 0."""
    dtype = gl.bfloat16 if tensor.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, columns], layout)


def ring_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, gated: bool, silu: bool, tiles: RingTiles
) -> None:
    """`linear.linear` or, where `gated`, `linear.gated_linear`, into contiguous `out`; where `supports` says so.

    Raises:
        ValueError: the tiles need more sums than the workspace holds.
    """
    (rows, depth), width = x.shape, out.shape[1]
    part = 16 * tiles.warps
    outputs = part if gated else part * tiles.parts
    tiles_m, tiles_n = triton.cdiv(rows, tiles.rows), triton.cdiv(width, outputs)
    blocks = triton.cdiv(depth, tiles.depth)
    units = tiles_m * tiles_n * blocks
    programs = min(units, tiles.programs * launch.multiprocessors(x.device))
    memory = launch.workspace(x.device)
    needed = 2 * programs * tiles.parts * part * tiles.rows
    if needed > len(memory.partial) or tiles_m * tiles_n > len(memory.counters):
        raise ValueError(f"tiles = {tiles} need {needed} sums for an output {tuple(out.shape)}")
    if gated and tiles.parts != 2:
        raise ValueError(f"tiles.parts = {tiles.parts}: a gated product has 2")
    dependent = launch.dependent_launch(x.device)
    _ring_kernel[(programs,)](
        descriptor(weight, part, tiles.depth), descriptor(x, tiles.rows, tiles.depth),
        out, weight if bias is None else bias, memory.partial, memory.counters,
        rows, width, blocks, tiles_m, units, width if gated else 0,
        tiles.parts, tiles.stages, gated, silu, bias is not None, dependent,
        num_warps=tiles.warps, **launch.launch_options(dependent),
    )  # fmt: skip
