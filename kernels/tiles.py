"""How products of few rows are cut, and the cut of each shape and number of rows; measured by `benches/gpu/linear.py --tune`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GemvTiles:
    """Of `gemv`."""

    outputs: int
    """Rows of the weights of one program; of each half where gated."""
    depth: int
    """Columns of the weights that are loaded at once; a power of two."""
    warps: int


@dataclass(frozen=True, slots=True)
class SplitTiles:
    """Of `split_linear`."""

    outputs: int
    """Rows of the weights of one program; of each half where gated."""
    depth: int
    """Columns of a pipeline's stage."""
    stages: int
    warps: int
    splits: int
    """Programs that share the inner dimension."""
    rows: int = 0
    """Rows of `x` of a tile; 0: as few as hold them, 64 at most."""


@dataclass(frozen=True, slots=True)
class RingTiles:
    """Of `ring_linear`."""

    rows: int
    """Rows of `x` of a tile: a power of two from 8 to 256."""
    parts: int
    """Accumulators of a program, each of `16 * warps` rows of the weights; 2 where gated."""
    depth: int
    """Columns of a stage."""
    stages: int
    warps: int
    """4 or 8."""
    programs: int
    """For each multiprocessor."""

    def stage_bytes(self) -> int:
        """Shared memory of a stage."""
        return 2 * self.depth * (self.parts * 16 * self.warps + self.rows)


Tiles = GemvTiles | SplitTiles | RingTiles


def power_of_two(number: int) -> int:
    """The least one that is not below `number`."""
    return 1 << (number - 1).bit_length()


def gemv_tiles(width: int, depth: int, gated: bool, multiprocessors: int) -> GemvTiles:
    """32 KiB of weights a program, in 64 registers of each of 128 threads, and two programs for each multiprocessor or more."""
    chunk = min(16384, power_of_two(depth))
    outputs = max(1, 16384 // chunk // (2 if gated else 1))
    while outputs > 1 and width // outputs < 2 * multiprocessors:
        outputs //= 2
    return GemvTiles(outputs=outputs, depth=chunk, warps=4)


def split_tiles(rows: int, width: int, depth: int, gated: bool, multiprocessors: int) -> SplitTiles:
    """Less than 100 KiB of shared memory a program, and two for each multiprocessor unless their sums become too many."""
    outputs = 64 if gated or rows <= 16 else 128
    wanted = 2 * multiprocessors // max(1, -(-width // outputs))
    splits = max(1, min(wanted, depth // 512, 8))
    return SplitTiles(outputs=outputs, depth=64, stages=4 if gated or outputs == 128 else 6, warps=4, splits=splits)


def invariant_tiles(width: int, depth: int, gated: bool, multiprocessors: int) -> SplitTiles:
    """One cut for any number of rows: a row's result does not depend on the others, nor on how many there are."""
    return dataclasses.replace(split_tiles(64, width, depth, gated, multiprocessors), rows=64)


def ring_tiles(rows: int, width: int, gated: bool) -> RingTiles:
    """Stages of 128 columns while their sums fit into shared memory; two programs a multiprocessor for the widest outputs alone."""
    if rows > 64:
        if rows > 128 and not gated and width > 4096:
            return RingTiles(rows=256, parts=1, depth=64, stages=4, warps=8, programs=1)
        if gated or width > 16384:
            return RingTiles(rows=128, parts=2, depth=64, stages=4, warps=8, programs=1)
        return RingTiles(rows=128, parts=1, depth=64, stages=6, warps=8, programs=1)
    tile = max(8, power_of_two(rows))
    if gated:
        return RingTiles(tile, parts=2, depth=128, stages=3 if tile < 32 else 2, warps=4, programs=2)
    stages = {8: 6, 16: 5, 32: 4, 64: 6}[tile]
    return RingTiles(tile, parts=1, depth=128, stages=stages, warps=4, programs=2 if width > 16384 and tile < 64 else 1)


def fastest(rows: int, width: int, depth: int, *, gated: bool, on_hopper: bool, multiprocessors: int) -> Tiles | None:
    """The cut that is fastest for a product `[rows, depth] x [width, depth]`, or None: cuBLAS is.

    Found on an H200 by `python -m benches.gpu.linear --tune`; from 33 rows on cuBLAS is beaten only where the activation comes
    with the product, where the output is as wide as a vocabulary, or (`python -m benches.gpu.step`) narrower than the input.
    """
    if rows == 1 or (rows == 2 and depth <= 8192):
        return gemv_tiles(width, depth, gated, multiprocessors)
    if not on_hopper:
        return split_tiles(rows, width, depth, gated, multiprocessors) if rows <= 64 else None
    if rows <= (16 if gated else 64 if depth >= width else 32):
        return ring_tiles(rows, width, gated)
    if rows <= 64 and gated:
        return SplitTiles(outputs=64, depth=128, stages=2, warps=4, splits=1)
    if rows <= 64 and width > 32768:
        return SplitTiles(outputs=128, depth=64, stages=4, warps=4, splits=1)
    return None
