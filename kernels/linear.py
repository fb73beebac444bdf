"""Matrix products of few rows, `y = x · Wᵀ`, and which kernel makes them.

A decode step reads every weight once and does little with it: these kernels are built to read at the memory's full rate. Products
of more rows are bound by arithmetic and left to cuBLAS.

| rows | kernel |
| --- | --- |
| 1 or 2 | `gemv`: plain arithmetic, whole rows of the weights at once |
| up to 32 or 64, Hopper | `ring_linear`: copies by the tensor memory accelerator through a ring of stages, work cut evenly |
| up to 64 | `split_linear`: portable, the inner dimension split over programs |
| more, or fp32 | cuBLAS |

`tiles.fastest` has the borders in full.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels import fused, gemv, launch, split_linear
from octavo.kernels.tiles import GemvTiles, RingTiles, SplitTiles, Tiles, fastest

try:
    from octavo.kernels import ring_linear
except ImportError:  # another release of Triton, whose Gluon differs
    ring_linear = None  # type: ignore[assignment]


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """`x · weightᵀ + bias`, accumulated in fp32.

    Args:
        x: `[M, K]`, rows of any stride.
        weight: `[N, K]`, contiguous, of the same dtype.
        bias: `[N]` or None.
        out: where the result goes, `[M, N]`, contiguous; None: new memory.
        tiles: which kernel and how it is cut; by default what is fastest.

    Returns:
        `[M, N]`, contiguous.

    Raises:
        ValueError: shapes or dtypes do not fit each other.
    """
    _check(x, weight, bias)
    tiles = _tiles(x, weight, tiles, gated=False)
    if tiles is None:
        if out is None:
            return torch.nn.functional.linear(x, weight, bias)
        return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)
    if out is None:
        out = torch.empty(x.shape[0], weight.shape[0], device=x.device, dtype=x.dtype)
    _run(x, weight, bias, out, gated=False, silu=False, tiles=tiles)
    return out


def gated_linear(x: Tensor, weight: Tensor, silu: bool, *, tiles: Tiles | None = None) -> Tensor:
    """`act(x · weight[:F]ᵀ) * (x · weight[F:]ᵀ)`, the activation of fp32 sums; SiLU, or GELU with tanh.

    Args:
        x: `[M, K]`, rows of any stride.
        weight: `[2F, K]`, contiguous, of the same dtype.
        silu: SiLU, else GELU.
        tiles: which kernel and how it is cut; by default what is fastest.

    Returns:
        `[M, F]`, contiguous.

    Raises:
        ValueError: shapes or dtypes do not fit each other.
    """
    _check(x, weight, None)
    if weight.shape[0] % 2:
        raise ValueError(f"weight of {weight.shape[0]} rows has no two halves")
    tiles = _tiles(x, weight, tiles, gated=True)
    if tiles is None:
        return fused.gated(torch.nn.functional.linear(x, weight), silu)
    out = torch.empty(x.shape[0], weight.shape[0] // 2, device=x.device, dtype=x.dtype)
    _run(x, weight, None, out, gated=True, silu=silu, tiles=tiles)
    return out


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1] or x.dtype != weight.dtype:
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} does not fit weight {tuple(weight.shape)} {weight.dtype}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)} does not fit weight {tuple(weight.shape)}")


def _tiles(x: Tensor, weight: Tensor, tiles: Tiles | None, *, gated: bool) -> Tiles | None:
    """What was asked for or is fastest; None where cuBLAS is, or where our kernels do not apply."""
    if not (x.shape[0] and weight.numel()):
        return None
    if not (weight.is_contiguous() and x.stride(1) == 1):
        if tiles is not None:
            raise ValueError(f"tiles = {tiles} need rows in one piece: strides are {x.stride()} and {weight.stride()}")
        return None
    if tiles is not None:
        return tiles
    if x.dtype not in (torch.bfloat16, torch.float16):
        return None
    return fastest(
        x.shape[0],
        weight.shape[0] // (2 if gated else 1),
        weight.shape[1],
        gated=gated,
        on_hopper=ring_linear is not None and ring_linear.supports(x, weight),
        multiprocessors=launch.multiprocessors(x.device),
    )


def _run(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, gated: bool, silu: bool, tiles: Tiles) -> None:
    if isinstance(tiles, GemvTiles):
        gemv.gemv(x, weight, bias, out, gated=gated, silu=silu, tiles=tiles)
    elif isinstance(tiles, RingTiles) and ring_linear is not None:
        ring_linear.ring_linear(x, weight, bias, out, gated=gated, silu=silu, tiles=tiles)
    elif isinstance(tiles, SplitTiles):
        split_linear.split_linear(x, weight, bias, out, gated=gated, silu=silu, tiles=tiles)
    else:
        raise ValueError(f"tiles = {tiles} need Hopper")
