"""The order in which persistent prefill programs take their tiles, made on the device once a step, for all layers.

A tile is a run of queries of one row. The list has the tiles with the most keys first: programs that go through it, forwards and
backwards in turn, have about the same work. Rows that another kernel does, and padding rows, have no tile: the launch is the
same whatever the lengths are, and costs what the step's queries cost.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels import launch

_PER_PROGRAM = 32
_AT_ONCE = 512


@triton.jit
def _tile_of(slot, base, starts, lengths, num_rows, minimum, TILE: tl.constexpr):
    """Row, first token, queries (0: no tile) and first position of slots: row `r` owns those from `starts[r] // TILE + r` on."""
    row = slot * 0
    high = row + num_rows
    # As many halvings as the longest search takes, whatever a slot's own search takes.
    span = num_rows
    while span > 1:
        middle = (row + high) // 2
        first = (tl.load(starts + middle) - base) // TILE + middle
        later = (first <= slot) & (high - row > 1)
        high = tl.where((high - row > 1) & (first > slot), middle, high)
        row = tl.where(later, middle, row)
        span = (span + 1) // 2
    start = tl.load(starts + row)
    count = tl.load(starts + row + 1) - start
    inside = (slot - (start - base) // TILE - row) * TILE
    queries = tl.minimum(TILE, count - inside)
    queries = tl.where((queries > 0) & (count >= minimum), queries, 0)
    return row, start + inside, queries, tl.load(lengths + row) - count + inside


@triton.jit(do_not_specialize=["num_rows", "slots", "minimum"])
def _plan_kernel(
    starts, lengths, plan, num_rows, slots, minimum,
    TILE: tl.constexpr, PER_PROGRAM: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Writes its slots' tiles to the places that follow from how many tiles of all slots have more keys."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    base = tl.load(starts)
    mine = tl.program_id(0) * PER_PROGRAM + tl.arange(0, PER_PROGRAM)
    row, token, queries, position = _tile_of(
        tl.minimum(mine, slots - 1), base, starts, lengths, num_rows, minimum, TILE
    )
    queries = tl.where(mine < slots, queries, 0)
    last = position + queries
    place = tl.zeros([PER_PROGRAM], tl.int32)
    total = 0
    for first in range(0, slots, AT_ONCE):
        other = first + tl.arange(0, AT_ONCE)
        _, _, its_queries, its_position = _tile_of(
            tl.minimum(other, slots - 1), base, starts, lengths, num_rows, minimum, TILE
        )
        exists = (its_queries > 0) & (other < slots)
        its_last = its_position + its_queries
        more = its_last[None, :] > last[:, None]
        as_many = (its_last[None, :] == last[:, None]) & (other[None, :] < mine[:, None])
        place += tl.sum((exists[None, :] & (more | as_many)).to(tl.int32), 1)
        total += tl.sum(exists.to(tl.int32), 0)
    entry = plan + 4 + 4 * place
    known = queries > 0
    tl.store(entry, row, mask=known)
    tl.store(entry + 1, token, mask=known)
    tl.store(entry + 2, queries, mask=known)
    tl.store(entry + 3, position, mask=known)
    if tl.program_id(0) == 0:
        tl.store(plan, total)


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Tiles of a step's prefill rows, longest first."""

    entries: Tensor
    """`[1 + slots, 4]` int32: the number of tiles; then row, first token, queries and first position of each."""
    tile: int
    """Queries of a tile."""


def prefill_plan(
    query_start_loc: Tensor, seq_lens: Tensor, num_tokens: int, *, tile: int, min_query_len: int = 1
) -> PrefillPlan:
    """Lists the tiles of rows that have `min_query_len` queries or more.

    Args:
        query_start_loc: `[R + 1]` int32, tokens of the rows; the first need not be 0.
        seq_lens: `[R]` int32, tokens of each sequence, its new ones included.
        num_tokens: how many tokens the rows have at most.
        tile: queries of a tile.
        min_query_len: rows with fewer queries have no tile.
    """
    rows = seq_lens.shape[0]
    slots = triton.cdiv(num_tokens, tile) + rows
    entries = torch.empty(1 + slots, 4, device=seq_lens.device, dtype=torch.int32)
    dependent = launch.dependent_launch(seq_lens.device)
    _plan_kernel[(triton.cdiv(slots, _PER_PROGRAM),)](
        query_start_loc, seq_lens, entries, rows, slots, max(1, min_query_len),
        tile, _PER_PROGRAM, _AT_ONCE, dependent, num_warps=4, **launch.launch_options(dependent),
    )  # fmt: skip
    return PrefillPlan(entries, tile)
