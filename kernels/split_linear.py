"""Matrix products of few rows on tensor cores, in portable Triton: tiles of the weights, the inner dimension split over programs.

Weights are the left operand (`yᵀ = W · xᵀ`): their rows are many, those of `x` few. Sums of a split go to the workspace; the
program that arrives last adds them up in the order of the splits, so the result does not depend on who is last. Where tiles of a
fixed number of rows are many, one program makes all splits' sums in turn and adds them up in the same order: a row gets the same
bits whatever else is multiplied with it (batch invariance: He et al., 2025).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels import launch
from octavo.kernels.fused import activate
from octavo.kernels.launch import prefetch
from octavo.kernels.tiles import SplitTiles, power_of_two

# Tiles of rows of neighbouring programs: the rows of `x` that they share stay in the cache.
_GROUP = 16


@triton.jit
def _step(first, second, source, acc, up, in_row, in_column, GATED: tl.constexpr):
    """One stage: `BK` columns of the weights and of `x`."""
    rows = tl.load(source, mask=in_column, other=None if in_column is None else 0.0)
    acc = tl.dot(tl.load(first, mask=in_row, other=None if in_row is None else 0.0), rows, acc, input_precision="ieee")
    if GATED:
        more = tl.load(second, mask=in_row, other=None if in_row is None else 0.0)
        up = tl.dot(more, rows, up, input_precision="ieee")
    return acc, up


@triton.jit
def _sums(
    first, second, source, begin, stop,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Of one split: the columns from `begin` to `stop`."""
    column = tl.arange(0, BK)
    acc = tl.zeros([BN, BM], tl.float32)
    up = tl.zeros([BN, BM], tl.float32)
    for at in range(begin, stop, BK):
        k = at + column
        if EVEN:
            acc, up = _step(first + k[None, :], second + k[None, :], source + k[:, None], acc, up, None, None, GATED)
        else:
            inside = k < stop
            acc, up = _step(
                first + k[None, :], second + k[None, :], source + k[:, None], acc, up,
                inside[None, :], inside[:, None], GATED,
            )  # fmt: skip
    return acc, up


@triton.jit
def _total(sums, STRIDE: tl.constexpr, SPLITS: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr):
    """Adds up the splits' sums, in their order."""
    total = tl.zeros([BN, BM], tl.float32)
    for split in range(SPLITS):
        total += tl.load(sums + split * STRIDE, cache_modifier=".cg")
    return total


@triton.jit
def _prefetch_rows(w, known, K, begin, width, GATED: tl.constexpr, BYTES: tl.constexpr):
    """Asks for the first bytes of the tile's rows, before the kernels in front have ended."""
    if BYTES != "":
        prefetch(w + known.to(tl.int64) * K + begin, BYTES)
        if GATED:
            prefetch(w + (known + width).to(tl.int64) * K + begin, BYTES)


@triton.jit(do_not_specialize=["M", "width", "tiles_m", "blocks"])
def _split_kernel(
    x, w, bias, y, partial, counters, M, width, K, x_stride, tiles_m, blocks,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, IN_TURN: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    GATED: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """Outputs `[BN, BM]` (GATED: both halves') of one tile over `blocks * BK` columns, or over IN_TURN times as many."""
    tile, split = tl.program_id(0), tl.program_id(1)
    # Neighbours have the same weights, and a group of them few enough rows of `x` for the cache.
    tiles_n = tl.cdiv(width, BN)
    group = tile // (GROUP * tiles_n)
    size = tl.minimum(GROUP, tiles_m - group * GROUP)
    inside_group = tile % (GROUP * tiles_n)
    row = inside_group // size * BN + tl.arange(0, BN)
    m = (group * GROUP + inside_group % size) * BM + tl.arange(0, BM)
    begin = split * blocks * BK
    stop = tl.minimum(K, begin + blocks * BK)
    # Rows past the ends are read as the last ones and not stored.
    known = tl.minimum(row, width - 1)
    first = w + known[:, None].to(tl.int64) * K
    second = w + (known + width)[:, None].to(tl.int64) * K
    source = x + tl.minimum(m, M - 1)[None, :].to(tl.int64) * x_stride
    if PDL:
        gdc_launch_dependents()
        _prefetch_rows(w, known, K, begin, width, GATED, PREFETCH)
        gdc_wait()
    acc, up = _sums(first, second, source, begin, stop, BM, BN, BK, EVEN, GATED)
    for _ in range(1, IN_TURN):
        begin = stop
        stop = tl.minimum(K, begin + blocks * BK)
        more, more_up = _sums(first, second, source, begin, stop, BM, BN, BK, EVEN, GATED)
        acc += more
        if GATED:
            up += more_up
    last = True
    if SPLITS > 1:
        SIZE: tl.constexpr = BN * BM
        PARTS: tl.constexpr = 2 if GATED else 1
        place = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        sums = partial + tile.to(tl.int64) * (SPLITS * PARTS * SIZE) + place
        tl.store(sums + split * (PARTS * SIZE), acc)
        if GATED:
            tl.store(sums + split * (PARTS * SIZE) + SIZE, up)
        # All threads' sums are written before one thread says so.
        tl.debug_barrier()
        last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1
        if last:
            acc = _total(sums, PARTS * SIZE, SPLITS, BN, BM)
            if GATED:
                up = _total(sums + SIZE, PARTS * SIZE, SPLITS, BN, BM)
            tl.store(counters + tile, 0)
    if last:
        if BIAS:
            acc += tl.load(bias + row, mask=row < width, other=0.0).to(tl.float32)[:, None]
        if GATED:
            acc = activate(acc, up, SILU)
        target = y + m[None, :].to(tl.int64) * width + row[:, None]
        tl.store(target, acc.to(y.dtype.element_ty), mask=(row < width)[:, None] & (m < M)[None, :])


def split_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, gated: bool, silu: bool, tiles: SplitTiles
) -> None:
    """`linear.linear` or, where `gated`, `linear.gated_linear`, into contiguous `out`.

    Raises:
        ValueError: the tiles need more sums than the workspace holds.
    """
    (rows, depth), width = x.shape, out.shape[1]
    tile_m = tiles.rows or min(64, max(8, power_of_two(rows)))
    tiles_m, tiles_n = triton.cdiv(rows, tile_m), triton.cdiv(width, tiles.outputs)
    blocks = triton.cdiv(triton.cdiv(depth, tiles.splits), tiles.depth)
    share = blocks * tiles.depth
    splits = triton.cdiv(depth, share)
    in_turn = 1
    # Tiles that fill the device by themselves have no use for more programs.
    if tiles.rows and tiles_m * tiles_n >= launch.multiprocessors(x.device):
        splits, in_turn = 1, splits
    partial, counters = out, out
    if splits > 1:
        memory = launch.workspace(x.device)
        partial, counters = memory.partial, memory.counters
        needed = tiles_m * tiles_n * splits * tiles.outputs * tile_m * (2 if gated else 1)
        if needed > len(partial) or tiles_m * tiles_n > len(counters):
            raise ValueError(f"tiles = {tiles} need {needed} sums for an output {tuple(out.shape)}")
    dependent = launch.dependent_launch(x.device)
    # A bulk prefetch takes multiples of 16 bytes from a multiple of 16 on, which a row that is shorter does not have.
    prefetch = str(min(share, 512) * 2) if dependent and depth % 8 == 0 and depth >= splits * share else ""
    _split_kernel[(tiles_m * tiles_n, splits)](
        x, weight, weight if bias is None else bias, out, partial, counters,
        rows, width, depth, x.stride(0), tiles_m, blocks,
        tile_m, tiles.outputs, tiles.depth, splits, in_turn, _GROUP, depth % tiles.depth == 0,
        gated, silu, bias is not None, dependent, prefetch,
        num_warps=tiles.warps, num_stages=tiles.stages, **launch.launch_options(dependent),
    )  # fmt: skip
