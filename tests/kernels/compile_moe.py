"""Compiles the experts' kernels for sm_90 as their launchers would; prints registers, stack and shared memory of each.

python tests/kernels/compile_moe.py FOLDER TOKENS,TOP,EXPERTS,HIDDEN,SIZE,EXACT ...
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from compile_linear import compiled
from triton.compiler import ASTSource
from usage import usage

from octavo.kernels import expert_gemm, expert_gemv, routing
from octavo.kernels.expert_tiles import GemvMixture, fastest
from octavo.kernels.tiles import power_of_two

SMALL = {"ids": "*i32", "weights": "*fp32", "order": "*i32", "tiles": "*i32", "offsets": "*i32", "logits": "*fp32"}


def kernel(function, dtype: str, constants: dict[str, object], warps: int, stages: int = 3):
    types = dict.fromkeys(("x", "w", "y", "out"), dtype) | SMALL
    options = {"num_warps": warps, "num_stages": stages, "launch_pdl": True}
    return function.__name__, compiled(ASTSource, function, types, {**constants, "PDL": True}, options)


def kernels(tokens: int, top: int, experts: int, hidden: int, size: int, exact: bool) -> Iterator[tuple[str, object]]:
    """Those of one mixture."""
    mixture = fastest(tokens, top, experts, hidden, size, exact=exact)
    dtype = "*fp32" if exact else "*bf16"
    width = power_of_two(experts)
    chunk = min(width, max(8, 4096 // width))
    yield kernel(routing._route_kernel, dtype, {"TOP": top, "SIZE": width, "CHUNK": chunk, "NORMALIZE": True}, 4)
    if isinstance(mixture, GemvMixture):
        for function, tiles, extra in (
            (expert_gemv._gate_up_kernel, mixture.gate_up, {"SILU": True}),
            (expert_gemv._down_kernel, mixture.down, {"SLOTS": power_of_two(top)}),
        ):
            constants = {"TOP": top, "BN": tiles.outputs, "BK": tiles.depth, **extra}
            yield kernel(function, dtype, constants, tiles.warps)
        return
    yield kernel(routing._sort_kernel, dtype, {"SIZE": min(4096, power_of_two(tokens * top))}, 8)
    yield kernel(routing._tile_kernel, dtype, {"ROWS": mixture.rows, "SIZE": width}, 4)
    for gated, tiles, depth in ((True, mixture.gate_up, hidden), (False, mixture.down, size)):
        constants = {
            "TOP": top if gated else 1, "BM": mixture.rows, "BN": tiles.outputs, "BK": tiles.depth, "GROUP": tiles.group,
            "EVEN": depth % tiles.depth == 0, "GATED": gated, "SILU": True, "LEFT": tiles.weights_left,
        }  # fmt: skip
        yield kernel(expert_gemm._expert_kernel, dtype, constants, tiles.warps, tiles.stages)
    yield kernel(expert_gemm._combine_kernel, dtype, {"TOP": top, "SIZE": 1024}, 4)


def main() -> None:
    for argument in sys.argv[2:]:
        tokens, top, experts, hidden, size, exact = map(int, argument.split(","))
        for name, found in kernels(tokens, top, experts, hidden, size, bool(exact)):
            wgmma = found.asm["ptx"].count("wgmma.mma_async")
            print(
                f"case={argument} kernel={name} {usage(found, sys.argv[1])} wgmma={wgmma}",
                flush=True,
            )


if __name__ == "__main__":
    main()
