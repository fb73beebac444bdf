"""Matrix products of one to four rows: a program owns whole rows of the weights and has them under way before it waits for `x`.

With so few operations for each byte the tensor cores are of no use; what counts is that enough bytes are in flight. A program loads
its rows at once, into registers, and reduces them with plain arithmetic.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels import launch
from octavo.kernels.fused import activate
from octavo.kernels.tiles import GemvTiles


@triton.jit
def _row_sum(weights, x, offset, inside, total):
    """Adds each row's product with one row of `x` at these columns."""
    value = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
    return total + tl.sum(weights.to(tl.float32) * value[None, :], 1)


@triton.jit(do_not_specialize=["width"])
def _gemv_kernel(
    x, w, bias, y, width, K, x_stride,
    ROWS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WHOLE: tl.constexpr,
    GATED: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`y[:, n]` for `BN` rows `n` of the weights (GATED: and rows `width + n`), for all `ROWS` rows of `x`."""
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    column = tl.arange(0, BK)
    inside = column < K
    # Rows past the end are read as the last one and not stored.
    known = tl.minimum(row, width - 1)
    first = w + known[:, None].to(tl.int64) * K
    second = w + (known + width)[:, None].to(tl.int64) * K
    if PDL:
        gdc_launch_dependents()
    weights = tl.load(first + column[None, :], mask=inside[None, :], other=0.0, cache_modifier=".cg")
    if GATED:
        up_weights = tl.load(second + column[None, :], mask=inside[None, :], other=0.0, cache_modifier=".cg")
    if PDL:
        gdc_wait()
    for m in tl.static_range(ROWS):
        total = _row_sum(weights, x + m * x_stride, column, inside, tl.zeros([BN], tl.float32))
        if GATED:
            up = _row_sum(up_weights, x + m * x_stride, column, inside, tl.zeros([BN], tl.float32))
        if not WHOLE:
            for at in range(BK, K, BK):
                later = at + column
                in_row = later < K
                more = tl.load(first + later[None, :], mask=in_row[None, :], other=0.0)
                total = _row_sum(more, x + m * x_stride, later, in_row, total)
                if GATED:
                    more = tl.load(second + later[None, :], mask=in_row[None, :], other=0.0)
                    up = _row_sum(more, x + m * x_stride, later, in_row, up)
        if BIAS:
            total += tl.load(bias + row, mask=row < width, other=0.0).to(tl.float32)
        if GATED:
            total = activate(total, up, SILU)
        tl.store(y + m * width + row, total.to(y.dtype.element_ty), mask=row < width)


def gemv(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, gated: bool, silu: bool, tiles: GemvTiles
) -> None:
    """`linear.linear` or, where `gated`, `linear.gated_linear` for one to four rows, into contiguous `out`."""
    width, depth = out.shape[1], x.shape[1]
    dependent = launch.dependent_launch(x.device)
    _gemv_kernel[(triton.cdiv(width, tiles.outputs),)](
        x, weight, weight if bias is None else bias, out, width, depth, x.stride(0),
        x.shape[0], tiles.outputs, tiles.depth, depth <= tiles.depth, gated, silu, bias is not None, dependent,
        num_warps=tiles.warps, **launch.launch_options(dependent),
    )  # fmt: skip
