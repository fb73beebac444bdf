"""Experts' products for very few tokens: every pair of token and expert reads its expert's weights as `gemv` does.

Two launches: gate and up with the activation, for each pair; then down, where a program owns outputs of a token and adds up all its
pairs, in the order of the slots, with their weights. `down` reads its experts' weights while `gate_up` runs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels import launch
from octavo.kernels.expert_tiles import ExpertGemvTiles
from octavo.kernels.fused import activate
from octavo.kernels.tiles import power_of_two


@triton.jit
def _products(weights, x, column, inside):
    """Each row's product with `x` at these columns, element by element."""
    value = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    return weights.to(tl.float32) * value[None, :]


@triton.jit
def _gate_up_kernel(
    x, w, ids, y, width, K, x_stride,
    TOP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SILU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`BN` outputs of one pair."""
    if PDL:
        # In this order: the next kernel begins when the choice of experts is there, and reads it at once.
        gdc_wait()
        gdc_launch_dependents()
    pair = tl.program_id(1)
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    column = tl.arange(0, BK)
    # Rows past the end are read as the last one and not stored.
    known = tl.minimum(row, width - 1)
    expert = w + tl.load(ids + pair).to(tl.int64) * (2 * width) * K
    first = expert + known[:, None].to(tl.int64) * K
    second = expert + (known + width)[:, None].to(tl.int64) * K
    source = x + (pair // TOP).to(tl.int64) * x_stride
    gate = tl.zeros([BN], tl.float32)
    up = tl.zeros([BN], tl.float32)
    for at in range(0, K, BK):
        k = at + column
        inside = k < K
        gate_rows = tl.load(first + k[None, :], mask=inside[None, :], other=0.0, cache_modifier=".cg")
        up_rows = tl.load(second + k[None, :], mask=inside[None, :], other=0.0, cache_modifier=".cg")
        gate += tl.sum(_products(gate_rows, source, k, inside), 1)
        up += tl.sum(_products(up_rows, source, k, inside), 1)
    value = activate(gate, up, SILU)
    tl.store(y + pair.to(tl.int64) * width + row, value.to(y.dtype.element_ty), mask=row < width)


@triton.jit
def _down_kernel(
    x, w, ids, weights, y, width, K,
    TOP: tl.constexpr, SLOTS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`BN` outputs of one token, all its slots at once: rows `slot * BN + n` of a tile."""
    if PDL:
        gdc_launch_dependents()
    token = tl.program_id(1).to(tl.int64)
    line = tl.arange(0, SLOTS * BN)
    slot, row = line // BN, tl.program_id(0) * BN + line % BN
    column = tl.arange(0, BK)
    used = slot < TOP
    pair = token * TOP + tl.minimum(slot, TOP - 1)
    # The choice is of the kernel before the one in front, which lets this one begin when it is there; so are the weights.
    expert, weight = tl.load(ids + pair, cache_modifier=".cg"), tl.load(weights + pair, cache_modifier=".cg")
    known = tl.minimum(row, width - 1)
    source = w + (expert.to(tl.int64) * width + known)[:, None] * K
    inside = used[:, None] & (column < K)[None, :]
    rows = tl.load(source + column[None, :], mask=inside, other=0.0, cache_modifier=".cg")
    if PDL:
        gdc_wait()
    hidden = x + pair[:, None] * K
    value = tl.load(hidden + column[None, :], mask=inside, other=0.0)
    total = tl.sum(rows.to(tl.float32) * value.to(tl.float32), 1)
    for at in range(BK, K, BK):
        k = at + column
        inside = used[:, None] & (k < K)[None, :]
        rows = tl.load(source + k[None, :], mask=inside, other=0.0, cache_modifier=".cg")
        value = tl.load(hidden + k[None, :], mask=inside, other=0.0)
        total += tl.sum(rows.to(tl.float32) * value.to(tl.float32), 1)
    result = tl.sum(tl.reshape(tl.where(used, weight * total, 0.0), [SLOTS, BN]), 0)
    out_row = tl.program_id(0) * BN + tl.arange(0, BN)
    tl.store(y + token * width + out_row, result.to(y.dtype.element_ty), mask=out_row < width)


def gate_up(x: Tensor, weight: Tensor, ids: Tensor, silu: bool, tiles: ExpertGemvTiles) -> Tensor:
    """`act(gate(x)) * up(x)` of each pair, `[T * k, F]`, for `x` `[T, D]`, `weight` `[E, 2F, D]` and `ids` `[T, k]`."""
    width, depth, pairs = weight.shape[1] // 2, weight.shape[2], ids.numel()
    out = torch.empty(pairs, width, device=x.device, dtype=x.dtype)
    dependent = launch.dependent_launch(x.device)
    _gate_up_kernel[(triton.cdiv(width, tiles.outputs), pairs)](
        x, weight, ids, out, width, depth, x.stride(0),
        ids.shape[1], tiles.outputs, tiles.depth, silu, dependent,
        num_warps=tiles.warps, **launch.launch_options(dependent),
    )  # fmt: skip
    return out


def down(hidden: Tensor, weight: Tensor, ids: Tensor, weights: Tensor, tiles: ExpertGemvTiles) -> Tensor:
    """The weighted sum of each token's pairs, `[T, D]`, for `gate_up`'s result and `weight` `[E, D, F]`; right after `gate_up`."""
    (tokens, top), (_, width, depth) = ids.shape, weight.shape
    out = torch.empty(tokens, width, device=hidden.device, dtype=hidden.dtype)
    dependent = launch.dependent_launch(hidden.device)
    _down_kernel[(triton.cdiv(width, tiles.outputs), tokens)](
        hidden, weight, ids, weights, out, width, depth,
        top, power_of_two(top), tiles.outputs, tiles.depth, dependent,
        num_warps=tiles.warps, **launch.launch_options(dependent),
    )  # fmt: skip
    return out
