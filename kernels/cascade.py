"""Decode attention of rows whose sequences begin with the same blocks: the shared keys are read once for all rows.

A first pass takes the queries of all rows, as many at a time as fill the tensor cores, to the shared keys; the second takes each
row's to the rest and merges the two by their log-sum-exps (shared-prefix attention: Juravsky et al., 2024; cascade inference: Ye et
al., 2025). How long the common beginning is, is found on the device: without one the first pass ends at once.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import launch
from octavo.kernels.decode import decode_attention
from octavo.kernels.decode_schedule import DecodeSchedule, DecodeShape, DecodeTiles, decode_schedule
from octavo.kernels.launch import begin_dependent

# Fewer shared keys are not worth two passes.
_LEAST_KEYS = 256
_TILE_QUERIES = 64
_COLUMNS_AT_ONCE = 512
_NO_LIMIT = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=["table_stride", "block_size"])
def _common_columns_kernel(
    table, starts, lengths, common, table_stride, block_size, COLUMNS: tl.constexpr, PDL: tl.constexpr
):
    """How many first blocks one row has in common with the first row, of those that no query of the two lies in."""
    begin_dependent(PDL)
    row = tl.program_id(0)
    first_count = tl.load(starts + 1) - tl.load(starts)
    count = tl.load(starts + row + 1) - tl.load(starts + row)
    limit = tl.minimum(tl.load(lengths) - first_count, tl.load(lengths + row) - count) // block_size
    same = 0
    at = 0
    while at < limit:
        column = at + tl.arange(0, COLUMNS)
        inside = column < limit
        mine = tl.load(table + row.to(tl.int64) * table_stride + column, mask=inside, other=0)
        differs = inside & (mine != tl.load(table + column, mask=inside, other=0))
        same = tl.minimum(limit, tl.min(tl.where(differs, column, at + COLUMNS), 0))
        # A difference ends the search.
        at = tl.where(same < at + COLUMNS, limit, at + COLUMNS)
    tl.store(common + row, tl.where(count > 0, same, _NO_LIMIT))


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "block_size", "least", "tokens"])
def _shared_rows_kernel(
    common, starts, shared_keys, tile_starts, tile_lengths, num_rows, num_tiles, block_size, least, tokens,
    ROWS: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The shared keys, and rows of `tokens` tokens each that see those and nothing else."""
    begin_dependent(PDL)
    shared = _NO_LIMIT
    rows = 0
    for first in range(0, num_rows, ROWS):
        row = first + tl.arange(0, ROWS)
        columns = tl.load(common + row, mask=row < num_rows, other=_NO_LIMIT)
        shared = tl.minimum(shared, tl.min(columns, 0))
        rows += tl.sum((columns != _NO_LIMIT).to(tl.int32), 0)
    keys = tl.where(rows > 1, shared, 0) * block_size
    keys = tl.where(keys >= least, keys, 0)
    tl.store(shared_keys, keys)
    begin, end = tl.load(starts), tl.load(starts + num_rows)
    for first in range(0, num_tiles + 1, TILES):
        tile = first + tl.arange(0, TILES)
        tl.store(tile_starts + tile, tl.minimum(begin + tile * tokens, end), mask=tile <= num_tiles)
        tl.store(tile_lengths + tile, tl.zeros([TILES], tl.int32) + keys, mask=tile < num_tiles)


@dataclass(frozen=True, slots=True)
class CascadeSchedule:
    """One step's cut of both passes."""

    keys: Tensor
    """`[1]` int32: how many first keys all rows share; 0: none, or too few."""
    tile_starts: Tensor
    """`[tiles + 1]` int32: tokens of the first pass's rows."""
    tile_lengths: Tensor
    """`[tiles]` int32: `keys` each."""
    first: DecodeSchedule
    rest: DecodeSchedule


def cascade_schedule(
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    shape: DecodeShape,
    *,
    block_size: int,
    num_tokens: int,
    least_keys: int = _LEAST_KEYS,
    tiles: DecodeTiles | None = None,
) -> CascadeSchedule:
    """Finds what all rows share and cuts both passes; four small launches a step.

    Args:
        block_table: `[R, max_blocks]` int32.
        query_start_loc: `[R + 1]` int32; all rows have at most `shape.max_query_len` queries. Empty rows are padding.
        seq_lens: `[R]` int32.
        shape: of the layers that will use it, without a window.
        block_size: keys of a block.
        num_tokens: how many tokens the rows have at most.
        least_keys: fewer shared keys are left to the second pass.
        tiles: the second pass's cut, instead of `shape.tiles`.

    Raises:
        ValueError: the shape has a window.
    """
    rows, device = seq_lens.shape[0], seq_lens.device
    tokens = max(1, _TILE_QUERIES // (shape.heads // shape.kv_heads))
    num_tiles = triton.cdiv(num_tokens, tokens)
    common, keys, tile_starts, tile_lengths = (
        torch.empty(size, device=device, dtype=torch.int32) for size in (rows, 1, num_tiles + 1, num_tiles)
    )
    dependent = launch.dependent_launch(device)
    options = launch.launch_options(dependent)
    _common_columns_kernel[(rows,)](
        block_table, query_start_loc, seq_lens, common, block_table.stride(0), block_size, _COLUMNS_AT_ONCE, dependent,
        num_warps=4, **options,
    )  # fmt: skip
    _shared_rows_kernel[(1,)](
        common, query_start_loc, keys, tile_starts, tile_lengths, rows, num_tiles, block_size, least_keys, tokens,
        512, 128, dependent, num_warps=4, **options,
    )  # fmt: skip
    first_shape = dataclasses.replace(shape, max_query_len=tokens)
    first = decode_schedule(tile_starts, tile_lengths, first_shape)
    rest = decode_schedule(query_start_loc, seq_lens, shape, shared_keys=keys, tiles=tiles)
    return CascadeSchedule(keys, tile_starts, tile_lengths, first, rest)


def cascade_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    schedule: CascadeSchedule,
    *,
    scale: float,
    softcap: float | None,
) -> None:
    """`decode.decode_attention` in two passes; arguments as there."""
    shared_out = torch.empty(q.shape, device=q.device, dtype=torch.float32)
    shared_lse = torch.empty(q.shape[:2], device=q.device, dtype=torch.float32)
    tiles = len(schedule.tile_lengths)
    decode_attention(
        q, kv_cache, block_table[:1].expand(tiles, -1), schedule.tile_starts, schedule.tile_lengths, shared_out,
        schedule.first, scale=scale, softcap=softcap, lse=shared_lse, causal=False,
    )  # fmt: skip
    decode_attention(
        q, kv_cache, block_table, query_start_loc, seq_lens, out, schedule.rest,
        scale=scale, softcap=softcap, shared=(shared_out, shared_lse),
    )  # fmt: skip
