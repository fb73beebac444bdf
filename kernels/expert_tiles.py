"""How the experts' products are cut, and the cut of each shape and number of tokens; measured by `benches/gpu/moe.py --tune`."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.kernels.tiles import power_of_two


@dataclass(frozen=True, slots=True)
class ExpertGemvTiles:
    """Of one product of `expert_gemv`."""

    outputs: int
    """Of one program; a power of two."""
    depth: int
    """Columns of the weights that are loaded at once; a power of two."""
    warps: int


@dataclass(frozen=True, slots=True)
class ExpertGemmTiles:
    """Of one product of `expert_gemm`."""

    outputs: int
    """Rows of the weights of a tile; of each half where gated."""
    depth: int
    """Columns of a pipeline's stage."""
    stages: int
    warps: int
    group: int
    """Tiles of rows whose programs are neighbours, so that they meet the same weights in the cache."""
    weights_left: bool
    """Whether the weights are the left operand: their many rows fill the tensor cores where there are few tokens."""


@dataclass(frozen=True, slots=True)
class GemvMixture:
    """All pairs one by one."""

    gate_up: ExpertGemvTiles
    down: ExpertGemvTiles


@dataclass(frozen=True, slots=True)
class GemmMixture:
    """The pairs sorted by expert."""

    rows: int
    """Pairs of a tile."""
    gate_up: ExpertGemmTiles
    down: ExpertGemmTiles


Mixture = GemvMixture | GemmMixture

# Elements of the weights that a program of 128 threads has under way, in 64 registers of each.
_AT_ONCE = 16384
_EXACT = ExpertGemmTiles(outputs=32, depth=32, stages=2, warps=4, group=8, weights_left=False)


def gemv_mixture(hidden: int, size: int, num_per_token: int) -> GemvMixture:
    """32 KiB of weights a program, of whole rows where they are short enough."""
    depth = min(_AT_ONCE // 2, power_of_two(hidden))
    slots = power_of_two(num_per_token)
    down_depth = min(_AT_ONCE // slots, power_of_two(size), 4096)
    return GemvMixture(
        gate_up=ExpertGemvTiles(outputs=_AT_ONCE // 2 // depth, depth=depth, warps=4),
        down=ExpertGemvTiles(outputs=_AT_ONCE // slots // down_depth, depth=down_depth, warps=4),
    )


def gemm_mixture(rows: int) -> GemmMixture:
    """For so many pairs an expert on average."""
    if rows <= 24:
        return GemmMixture(
            rows=16 if rows <= 8 else 32,
            gate_up=ExpertGemmTiles(
                outputs=64, depth=128, stages=3 if rows <= 8 else 2, warps=4, group=1, weights_left=True
            ),
            down=ExpertGemmTiles(outputs=64, depth=128, stages=3, warps=4, group=1, weights_left=True),
        )
    if rows <= 64:
        return GemmMixture(
            rows=64,
            gate_up=ExpertGemmTiles(outputs=64, depth=64, stages=4, warps=4, group=4, weights_left=False),
            down=ExpertGemmTiles(outputs=128, depth=64, stages=4, warps=4, group=4, weights_left=False),
        )
    return GemmMixture(
        rows=128,
        gate_up=ExpertGemmTiles(outputs=128, depth=64, stages=3, warps=8, group=8, weights_left=False),
        down=ExpertGemmTiles(outputs=128, depth=64, stages=4, warps=8, group=8, weights_left=False),
    )


def fastest(tokens: int, num_per_token: int, experts: int, hidden: int, size: int, *, exact: bool) -> Mixture:
    """The cut that is fastest for so many tokens; `exact` (fp32): one whose sums of a token do not depend on the others."""
    if exact:
        return GemmMixture(rows=16, gate_up=_EXACT, down=_EXACT)
    pairs = tokens * num_per_token
    # While few experts are chosen twice, no weights are read twice.
    if tokens == 1 or pairs <= experts // 4:
        return gemv_mixture(hidden, size, num_per_token)
    return gemm_mixture(-(-pairs // min(experts, pairs)))
