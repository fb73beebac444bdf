"""Mixtures of experts without a wait for the device: grids depend on the number of tokens alone, so a graph can hold them.

| pairs of a token and an expert | kernels |
| --- | --- |
| one token, or at most a quarter as many as experts | `routing.route`, `expert_gemv`: every pair by itself |
| more, or fp32 | `routing`, `expert_gemm`: sorted by expert |

`expert_tiles.fastest` has the cuts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels import expert_gemm, expert_gemv, linear
from octavo.kernels.expert_tiles import GemvMixture, Mixture, fastest
from octavo.kernels.routing import by_expert, route
from octavo.kernels.tiles import SplitTiles


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, tiles: SplitTiles | None = None) -> Tensor:
    """`x · weightᵀ + bias` in fp32, `[T, E]`: rounding must not make experts equal. `tiles`: the cut, if not the fastest."""
    out = torch.empty(x.shape[0], weight.shape[0], device=x.device, dtype=torch.float32)
    if tiles is not None:
        return linear.linear(x, weight, bias, out=out, tiles=tiles)
    if x.shape[0] <= 1 or x.dtype == torch.float32:
        return linear.linear(x, weight, bias, out=out)
    # So few outputs make few tiles: the inner dimension is split while there are few tokens.
    splits = max(1, min(8, x.shape[1] // 256)) if x.shape[0] <= 1024 else 1
    return linear.linear(
        x, weight, bias, out=out, tiles=SplitTiles(outputs=64, depth=64, stages=4, warps=4, splits=splits)
    )


def mixture(
    x: Tensor,
    logits: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    num_per_token: int,
    normalize: bool,
    silu: bool,
    tiles: Mixture | None = None,
) -> Tensor:
    """`Σ p[e] · down[e](act(gate[e](x)) * up[e](x))` over the experts that `route` chooses.

    Args:
        x: `[T, D]`, rows of any stride.
        logits: `[T, E]` of the router; rows of any content are harmless to the others.
        gate_up: `[E, 2F, D]`, contiguous, of `x`'s dtype: gate's rows, then up's.
        down: `[E, D, F]`, likewise.
        num_per_token: `k`.
        normalize: scale a token's probabilities to sum to 1.
        silu: SiLU, else GELU with tanh.
        tiles: which kernels and how they are cut; by default what is fastest.

    Returns:
        `[T, D]`, contiguous.

    Raises:
        ValueError: shapes or dtypes do not fit each other.
    """
    (tokens, hidden), (experts, double, depth) = x.shape, gate_up.shape
    if (
        depth != hidden
        or logits.shape != (tokens, experts)
        or down.shape != (experts, hidden, double // 2)
        or double % 2
        or {gate_up.dtype, down.dtype} != {x.dtype}
        or not (gate_up.is_contiguous() and down.is_contiguous())
    ):
        raise ValueError(
            f"x {tuple(x.shape)} {x.dtype} and logits {tuple(logits.shape)} do not fit experts "
            f"{tuple(gate_up.shape)} {gate_up.dtype} and {tuple(down.shape)} {down.dtype}"
        )
    if tokens == 0:
        return torch.empty_like(x)
    if x.stride(1) != 1:
        x = x.contiguous()
    exact = x.dtype == torch.float32
    tiles = tiles or fastest(tokens, num_per_token, experts, hidden, double // 2, exact=exact)
    routed = route(logits, num_per_token, normalize)
    if isinstance(tiles, GemvMixture):
        inner = expert_gemv.gate_up(x, gate_up, routed.ids, silu, tiles.gate_up)
        return expert_gemv.down(inner, down, routed.ids, routed.weights, tiles.down)
    order = by_expert(routed.ids, experts, tiles.rows)
    inner = expert_gemm.gate_up(x, gate_up, order, num_per_token, silu, tiles.gate_up)
    return expert_gemm.combine(expert_gemm.down(inner, down, order, routed.weights, tiles.down), num_per_token)
