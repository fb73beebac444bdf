"""How decode attention's work is cut over programs: made on the device once a step, for all layers of a shape.

The tiles of keys of all rows and key/value heads stand in one line (row, head, tile); each program gets an equal run of it
(Stream-K: Osama et al., 2023), so the launch has the device's size whatever the lengths are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from octavo.kernels import launch

ENTRY_WORDS = 8
"""Of a program: row, the row's first tile, first token, queries, length, tiles a program, all tiles, shared keys."""

_PER_PROGRAM = 16
# One number for all steps, so that one kernel serves every size of batch.
_ROWS_AT_ONCE = 512
_FEW_ROWS = 8


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """How decode attention is cut; ranked by `python -m benches.gpu.decode --tune`."""

    keys: int
    """Keys of a tile."""
    warps: int
    stages: int
    programs: int
    """Programs for each multiprocessor."""
    least: int
    """Tiles of a program at least: fewer are not worth a merge."""


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """What a layer's decode attention is compiled for, as far as the cut of its work depends on it."""

    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    max_query_len: int
    """Rows of more queries are left out."""
    window: int | None = None
    """A token sees so many last positions, its own included; None: all."""

    @property
    def queries(self) -> int:
        """Of a row, all heads' of a key/value head together, at most."""
        return self.heads // self.kv_heads * self.max_query_len

    @property
    def tile_queries(self) -> int:
        """Rows of a tile: `queries` as a power of two that tensor cores take."""
        return max(16, int(triton.next_power_of_2(self.queries)))

    def tiles(self, rows: int) -> DecodeTiles:
        """The fastest cut for so many rows, whose lengths the host does not know."""
        if self.dtype == torch.float32:
            return DecodeTiles(keys=32, warps=4, stages=1, programs=2, least=2)
        if self.tile_queries >= 64:
            return DecodeTiles(keys=64 if self.dim <= 128 else 32, warps=8, stages=3, programs=1, least=2)
        if self.dim > 128:
            return DecodeTiles(keys=32, warps=4, stages=3, programs=2, least=4)
        if rows <= _FEW_ROWS:
            return DecodeTiles(keys=64, warps=4, stages=2, programs=3, least=1)
        return DecodeTiles(keys=64, warps=2, stages=2, programs=4, least=2)


@dataclass(frozen=True, slots=True)
class DecodeSchedule:
    """One step's cut for the layers of a shape."""

    shape: DecodeShape
    tiles: DecodeTiles
    entries: Tensor
    """`[programs, ENTRY_WORDS]` int32."""
    counters: Tensor
    """`[rows * kv_heads]` int32, zeros between kernels: arrivals of programs that share a row and head."""
    leaves_shared: bool
    """Whether keys that all rows share are left out at the rows' beginnings."""


@triton.jit
def row_tiles(length, count, shared, QUERIES: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr):
    """The first key that `count` queries at the end of `length` tokens see outside the shared ones, and how many tiles follow.

    Rows without queries, or with too many, have no tile.
    """
    begin = shared
    if WINDOW > 0:
        begin = tl.maximum(0, length - count - WINDOW + 1) // BN * BN
    ours = (count > 0) & (count <= QUERIES)
    return begin, tl.where(ours, tl.cdiv(tl.maximum(length - begin, 0), BN), 0)


@triton.jit
def _tiles_of_rows(
    row, num_rows, starts, lengths, shared,
    KV_HEADS: tl.constexpr, QUERIES: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    inside = row < num_rows
    start = tl.load(starts + row, mask=inside, other=0)
    count = tl.load(starts + row + 1, mask=inside, other=0) - start
    length = tl.load(lengths + row, mask=inside, other=0)
    _begin, tiles = row_tiles(length, count, shared, QUERIES, BN, WINDOW)
    return tiles * KV_HEADS


@triton.jit(do_not_specialize=["num_rows", "programs", "least"])
def _schedule_kernel(
    starts, lengths, shared_keys, entries, counters, num_rows, programs, least,
    KV_HEADS: tl.constexpr, QUERIES: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr,
    SHARED: tl.constexpr, ROWS: tl.constexpr, PER_PROGRAM: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Entries of `PER_PROGRAM` programs, each found by how many rows end before its first tile."""
    # Its own readers may not begin early: they read before they wait.
    if PDL:
        gdc_wait()
    shared = 0
    if SHARED:
        shared = tl.load(shared_keys)
    i = tl.arange(0, ROWS)
    total = 0
    for first in range(0, num_rows, ROWS):
        tiles = _tiles_of_rows(first + i, num_rows, starts, lengths, shared, KV_HEADS, QUERIES, BN, WINDOW)
        total += tl.sum(tiles, 0)
    share = tl.maximum(tl.cdiv(total, programs), least)
    mine = tl.program_id(0) * PER_PROGRAM + tl.arange(0, PER_PROGRAM)
    tile = mine * share
    row = tl.zeros([PER_PROGRAM], tl.int32)
    base = tl.zeros([PER_PROGRAM], tl.int32)
    before = 0
    for first in range(0, num_rows, ROWS):
        tiles = _tiles_of_rows(first + i, num_rows, starts, lengths, shared, KV_HEADS, QUERIES, BN, WINDOW)
        ends = before + tl.cumsum(tiles, 0)
        ended = (ends[None, :] <= tile[:, None]) & (first + i < num_rows)[None, :]
        row += tl.sum(ended.to(tl.int32), 1)
        base = tl.maximum(base, tl.max(tl.where(ended, ends[None, :], 0), 1))
        before += tl.sum(tiles, 0)
    known = (mine < programs) & (row < num_rows)
    start = tl.load(starts + row, mask=known, other=0)
    count = tl.load(starts + row + 1, mask=known, other=0) - start
    length = tl.load(lengths + row, mask=known, other=0)
    entry = entries + mine * WORDS
    inside = mine < programs
    tl.store(entry, row, mask=inside)
    tl.store(entry + 1, base, mask=inside)
    tl.store(entry + 2, start, mask=inside)
    tl.store(entry + 3, count, mask=inside)
    tl.store(entry + 4, length, mask=inside)
    tl.store(entry + 5, tl.zeros_like(mine) + share, mask=inside)
    tl.store(entry + 6, tl.zeros_like(mine) + total, mask=inside)
    tl.store(entry + 7, tl.zeros_like(mine) + shared, mask=inside)
    for first in range(tl.program_id(0) * ROWS, num_rows * KV_HEADS, tl.num_programs(0) * ROWS):
        tl.store(counters + first + i, tl.zeros([ROWS], tl.int32), mask=first + i < num_rows * KV_HEADS)


def decode_schedule(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    shape: DecodeShape,
    *,
    shared_keys: Tensor | None = None,
    tiles: DecodeTiles | None = None,
    programs: int | None = None,
) -> DecodeSchedule:
    """Cuts the tiles of the rows that have 1 to `shape.max_query_len` queries; one small launch, no synchronisation.

    Args:
        query_start_loc: `[R + 1]` int32, tokens of the rows; the first need not be 0.
        seq_lens: `[R]` int32, tokens of each sequence, its new ones included.
        shape: of the layers that will use it.
        shared_keys: `[1]` int32: so many first keys of each row are left out.
        tiles: the cut, instead of `shape.tiles`.
        programs: how many, instead of what fills the device.

    Raises:
        ValueError: shared keys with a window.
    """
    if shared_keys is not None and shape.window is not None:
        raise ValueError(f"shared_keys with window = {shape.window}")
    rows, device = seq_lens.shape[0], seq_lens.device
    tiles = tiles or shape.tiles(rows)
    programs = programs or tiles.programs * launch.multiprocessors(device)
    entries = torch.empty(programs, ENTRY_WORDS, device=device, dtype=torch.int32)
    counters = torch.empty(rows * shape.kv_heads, device=device, dtype=torch.int32)
    dependent = launch.dependent_launch(device)
    _schedule_kernel[(triton.cdiv(programs, _PER_PROGRAM),)](
        query_start_loc, seq_lens, seq_lens if shared_keys is None else shared_keys, entries, counters,
        rows, programs, tiles.least,
        shape.kv_heads, shape.max_query_len, tiles.keys, shape.window or 0, shared_keys is not None,
        _ROWS_AT_ONCE, _PER_PROGRAM, ENTRY_WORDS, dependent,
        num_warps=4, **launch.launch_options(dependent),
    )  # fmt: skip
    return DecodeSchedule(shape, tiles, entries, counters, shared_keys is not None)
