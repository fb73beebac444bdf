"""Which experts a token goes to, and the tokens of each expert in tiles: all on the device, with grids that only depend on sizes.

`T` tokens choose `k` of `E` experts each: `T * k` pairs, pair `t * k + s` is slot `s` of token `t`. The pairs are sorted by expert
(stable, so the result does not depend on timing), and each expert's pairs cut into tiles of rows for the products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import launch
from octavo.kernels.launch import begin_dependent

MAX_EXPERTS = 1024


@triton.jit
def _logits(row, expert, experts):
    """fp32; what is no number, or no expert, comes last."""
    value = tl.load(row + expert, mask=expert < experts, other=float("-inf")).to(tl.float32)
    return tl.where(value == value, value, float("-inf"))  # noqa: PLR0124 - false of NaN alone


@triton.jit
def _route_kernel(
    logits, ids, weights, experts, stride,
    TOP: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr, NORMALIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token a program. An expert's slot is its rank: how many experts have a larger logit, or the same and a lower index."""
    begin_dependent(PDL)
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * stride
    expert = tl.arange(0, SIZE)
    value = _logits(row, expert, experts)
    rank = tl.zeros([SIZE], tl.int32)
    for at in range(0, SIZE, CHUNK):
        rival = at + tl.arange(0, CHUNK)
        theirs = _logits(row, rival, experts)
        larger = theirs[None, :] > value[:, None]
        first = (theirs[None, :] == value[:, None]) & (rival[None, :] < expert[:, None])
        rank += tl.sum((larger | first).to(tl.int32), 1)
    best = tl.max(value, 0)
    share = tl.exp(value - tl.where(best == float("-inf"), 0.0, best))
    chosen = (rank < TOP) & (expert < experts)
    total = tl.sum(tl.where(chosen, share, 0.0) if NORMALIZE else share, 0)
    tl.store(ids + token * TOP + rank, expert, mask=chosen)
    tl.store(weights + token * TOP + rank, share / tl.where(total == 0.0, 1.0, total), mask=chosen)


@triton.jit(do_not_specialize=["pairs"])
def _sort_kernel(ids, order, offsets, pairs, SIZE: tl.constexpr, PDL: tl.constexpr):
    """One expert a program: counts the pairs of the experts before it, then writes its own ones in their order."""
    begin_dependent(PDL)
    expert = tl.program_id(0)
    lane = tl.arange(0, SIZE)
    first = 0
    for at in range(0, pairs, SIZE):
        id = tl.load(ids + at + lane, mask=at + lane < pairs, other=0x7FFFFFFF)
        first += tl.sum((id < expert).to(tl.int32), 0)
    tl.store(offsets + expert, first)
    for at in range(0, pairs, SIZE):
        id = tl.load(ids + at + lane, mask=at + lane < pairs, other=0x7FFFFFFF)
        mine = (id == expert).to(tl.int32)
        tl.store(order + first + tl.cumsum(mine, 0) - 1, at + lane, mask=mine != 0)
        first += tl.sum(mine, 0)
    if expert == tl.num_programs(0) - 1:
        tl.store(offsets + expert + 1, pairs)


@triton.jit(do_not_specialize=["experts"])
def _tile_kernel(offsets, tiles, experts, ROWS: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr):
    """One program: each expert's tiles, one after another."""
    begin_dependent(PDL)
    expert = tl.arange(0, SIZE)
    known = expert < experts
    first = tl.load(offsets + expert, mask=known, other=0)
    last = tl.load(offsets + expert + 1, mask=known, other=0)
    count = (last - first + ROWS - 1) // ROWS
    end = tl.cumsum(count, 0)
    tl.store(tiles, tl.sum(count, 0))
    for j in range(tl.max(count, 0)):
        entry = tiles + 4 * (1 + end - count + j)
        here = j < count
        tl.store(entry, expert, mask=here)
        tl.store(entry + 1, first + j * ROWS, mask=here)
        tl.store(entry + 2, last, mask=here)


@dataclass(frozen=True, slots=True)
class Route:
    """The experts of every token."""

    ids: Tensor
    """`[T, k]` int32, the largest probability first."""
    weights: Tensor
    """`[T, k]` fp32."""


@dataclass(frozen=True, slots=True)
class ExpertOrder:
    """The pairs sorted by expert, in tiles."""

    order: Tensor
    """`[T * k]` int32, the pair at each place."""
    tiles: Tensor
    """`[1 + max_tiles, 4]` int32: the number of tiles; of each tile its expert, its first place, its expert's end."""
    rows: int
    """Places of a tile."""

    @property
    def max_tiles(self) -> int:
        """As many as there can be."""
        return self.tiles.shape[0] - 1


def route(logits: Tensor, num_per_token: int, normalize: bool) -> Route:
    """The `num_per_token` experts of the largest logits, of equal ones the lower, and their softmax over all experts.

    Logits that are NaN count as the smallest: every row, whatever it holds, gets experts that exist and differ.

    Args:
        logits: `[T, E]`, contiguous rows.
        num_per_token: `k`.
        normalize: scale the weights of a token to sum to 1.

    Raises:
        ValueError: `k` is not in `1..E`, or E is above `MAX_EXPERTS`.
    """
    tokens, experts = logits.shape
    if not 1 <= num_per_token <= experts <= MAX_EXPERTS:
        raise ValueError(f"num_per_token = {num_per_token} of {experts} experts; 1 to {MAX_EXPERTS} experts are routed")
    ids = torch.empty(tokens, num_per_token, device=logits.device, dtype=torch.int32)
    weights = torch.empty(tokens, num_per_token, device=logits.device, dtype=torch.float32)
    if tokens:
        size, dependent = triton.next_power_of_2(experts), launch.dependent_launch(logits.device)
        _route_kernel[(tokens,)](
            logits, ids, weights, experts, logits.stride(0),
            num_per_token, size, min(size, max(8, 4096 // size)), normalize, dependent,
            num_warps=4 if size >= 64 else 1, **launch.launch_options(dependent),
        )  # fmt: skip
    return Route(ids, weights)


def most_tiles(pairs: int, experts: int, rows: int) -> int:
    """Tiles of so many rows that `pairs` can fill: each expert of at most all has one that is not full."""
    return (pairs + min(experts, pairs) * (rows - 1)) // rows


def by_expert(ids: Tensor, experts: int, rows: int) -> ExpertOrder:
    """Sorts the pairs of `ids` `[T, k]`, all in `0..experts`, by expert, in tiles of `rows`."""
    pairs, device = ids.numel(), ids.device
    order = torch.empty(pairs, device=device, dtype=torch.int32)
    offsets = torch.empty(experts + 1, device=device, dtype=torch.int32)
    tiles = torch.empty(1 + most_tiles(pairs, experts, rows), 4, device=device, dtype=torch.int32)
    dependent = launch.dependent_launch(device)
    size = min(4096, max(64, triton.next_power_of_2(pairs)))
    _sort_kernel[(experts,)](
        ids, order, offsets, pairs, size, dependent,
        num_warps=8 if size > 1024 else 4, **launch.launch_options(dependent),
    )  # fmt: skip
    _tile_kernel[(1,)](
        offsets, tiles, experts, rows, triton.next_power_of_2(experts), dependent,
        num_warps=4, **launch.launch_options(dependent),
    )  # fmt: skip
    return ExpertOrder(order, tiles, rows)
