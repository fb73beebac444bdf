"""How products of few rows are cut, and the cut of each shape and number of rows; measured by `benches/gpu/linear.py --tune`."""

from __future__ import annotations

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


def ring_tiles(rows: int, width: int, gated: bool) -> RingTiles:
    """Two programs of about 100 KiB on each multiprocessor, or one where a tile's sums would have many parts to add up.

    For many rows one program of 192 KiB computes more with what it reads.
    """
    if rows > 64:
        if rows > 128 and not gated and width > 4096:
            return RingTiles(rows=256, parts=1, depth=64, stages=4, warps=8, programs=1)
        if gated or width > 16384:
            return RingTiles(rows=128, parts=2, depth=64, stages=4, warps=8, programs=1)
        return RingTiles(rows=128, parts=1, depth=64, stages=6, warps=8, programs=1)
    tile = max(8, power_of_two(rows))
    parts = 2 if gated or width > 8192 else 1
    programs = 1 if rows > 16 and width <= 8192 else 2
    stage = RingTiles(tile, parts, depth=64, stages=1, warps=4, programs=programs).stage_bytes()
    return RingTiles(tile, parts, depth=64, stages=min(12, (108 << 10) // stage), warps=4, programs=programs)
