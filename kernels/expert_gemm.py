"""Experts' products on tensor cores: a program multiplies one tile of an expert's pairs with one tile of its weights.

The grid has room for as many tiles as there can be; programs past those there are end at once. Gate and up gather the pairs' tokens
and leave the activations sorted by expert; down reads them so, and writes each pair's weighted output to the pair's own place.
`combine` adds up those of a token in the order of the slots: nothing depends on timing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import launch
from octavo.kernels.expert_tiles import ExpertGemmTiles
from octavo.kernels.fused import activate
from octavo.kernels.launch import begin_dependent
from octavo.kernels.routing import ExpertOrder


@triton.jit
def _multiply(rows, weights, acc, LEFT: tl.constexpr):
    """Adds `rows · weightsᵀ`, `[BM, BN]`, or with LEFT its transpose."""
    if LEFT:
        acc = tl.dot(weights, tl.trans(rows), acc, input_precision="ieee")
    else:
        acc = tl.dot(rows, tl.trans(weights), acc, input_precision="ieee")
    return acc


@triton.jit
def _load(pointer, inside):
    """A tile, zeros where a column is not `inside`; None: all are."""
    return tl.load(pointer, mask=inside, other=None if inside is None else 0.0)


@triton.jit(do_not_specialize=["width", "tiles_n"])
def _expert_kernel(
    x, w, y, order, tiles, weights, width, K, x_stride, tiles_n,
    TOP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr, LEFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`BM` places of one expert, `BN` outputs; the groups' programs go down the tiles of rows first."""
    begin_dependent(PDL)
    group = tl.program_id(0) // (GROUP * tiles_n)
    within = tl.program_id(0) % (GROUP * tiles_n)
    tile = group * GROUP + within % GROUP
    if tile < tl.load(tiles):
        entry = tiles + 4 * (1 + tile)
        expert, first, last = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        place = first + tl.arange(0, BM)
        row = within // GROUP * BN + tl.arange(0, BN)
        column = tl.arange(0, BK)
        # Places and rows past the ends are read as the last ones and not stored.
        pair = tl.load(order + tl.minimum(place, last - 1))
        known = tl.minimum(row, width - 1)
        if GATED:
            source = x + (pair // TOP).to(tl.int64)[:, None] * x_stride + column[None, :]
            base = w + expert.to(tl.int64) * (2 * width) * K
            second = base + (known + width)[:, None].to(tl.int64) * K + column[None, :]
        else:
            source = x + tl.minimum(place, last - 1).to(tl.int64)[:, None] * x_stride + column[None, :]
            base = w + expert.to(tl.int64) * width * K
            second = base
        weight = base + known[:, None].to(tl.int64) * K + column[None, :]
        if LEFT:
            acc = tl.zeros([BN, BM], tl.float32)
            up = tl.zeros([BN, BM], tl.float32)
        else:
            acc = tl.zeros([BM, BN], tl.float32)
            up = tl.zeros([BM, BN], tl.float32)
        for at in range(0, K, BK):
            inside = None if EVEN else (at + column < K)[None, :]
            rows = _load(source + at, inside)
            acc = _multiply(rows, _load(weight + at, inside), acc, LEFT)
            if GATED:
                up = _multiply(rows, _load(second + at, inside), up, LEFT)
        if GATED:
            acc = activate(acc, up, SILU)
        if LEFT:
            acc = tl.trans(acc)
        here = (place < last)[:, None] & (row < width)[None, :]
        if GATED:
            target = place
        else:
            target = pair
            acc *= tl.load(weights + pair)[:, None]
        out = y + target.to(tl.int64)[:, None] * width + row[None, :]
        tl.store(out, acc.to(y.dtype.element_ty), mask=here)


@triton.jit
def _combine_kernel(x, out, width, TOP: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr):
    """`SIZE` columns of one token."""
    begin_dependent(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = column < width
    total = tl.zeros([SIZE], tl.float32)
    for slot in tl.static_range(TOP):
        total += tl.load(x + (token * TOP + slot) * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)


def _run(
    x: Tensor, weight: Tensor, out: Tensor, order: ExpertOrder, weights: Tensor, *,
    top: int, gated: bool, silu: bool, tiles: ExpertGemmTiles,
) -> None:  # fmt: skip
    width, depth = out.shape[1], weight.shape[2]
    tiles_n = triton.cdiv(width, tiles.outputs)
    tiles_m = triton.cdiv(order.max_tiles, tiles.group) * tiles.group
    dependent = launch.dependent_launch(x.device)
    _expert_kernel[(tiles_m * tiles_n,)](
        x, weight, out, order.order, order.tiles, weights, width, depth, x.stride(0), tiles_n,
        top, order.rows, tiles.outputs, tiles.depth, tiles.group,
        depth % tiles.depth == 0, gated, silu, tiles.weights_left, dependent,
        num_warps=tiles.warps, num_stages=tiles.stages, **launch.launch_options(dependent),
    )  # fmt: skip


def gate_up(
    x: Tensor, weight: Tensor, order: ExpertOrder, num_per_token: int, silu: bool, tiles: ExpertGemmTiles
) -> Tensor:
    """`act(gate(x)) * up(x)` of the pair at each place, `[T * k, F]`, for `x` `[T, D]` and `weight` `[E, 2F, D]`."""
    out = torch.empty(order.order.shape[0], weight.shape[1] // 2, device=x.device, dtype=x.dtype)
    _run(x, weight, out, order, out, top=num_per_token, gated=True, silu=silu, tiles=tiles)
    return out


def down(hidden: Tensor, weight: Tensor, order: ExpertOrder, weights: Tensor, tiles: ExpertGemmTiles) -> Tensor:
    """Each pair's output times its weight, `[T * k, D]`, for `hidden` `[T * k, F]` in order and `weight` `[E, D, F]`."""
    out = torch.empty(hidden.shape[0], weight.shape[1], device=hidden.device, dtype=hidden.dtype)
    _run(hidden, weight, out, order, weights, top=1, gated=False, silu=False, tiles=tiles)
    return out


def combine(pairs: Tensor, num_per_token: int) -> Tensor:
    """The sums of each token's rows in `pairs` `[T * k, D]`, in fp32: `[T, D]`."""
    count, width = pairs.shape
    out = torch.empty(count // num_per_token, width, device=pairs.device, dtype=pairs.dtype)
    size, dependent = min(1024, triton.next_power_of_2(width)), launch.dependent_launch(pairs.device)
    _combine_kernel[(out.shape[0], triton.cdiv(width, size))](
        pairs, out, width, num_per_token, size, dependent, num_warps=4, **launch.launch_options(dependent)
    )
    return out
