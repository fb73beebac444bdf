"""Compiles the products' kernels for sm_90 as their launchers would; prints registers, stack and shared memory of each.

python tests/kernels/compile_linear.py FOLDER gemv|split|ring ROWS,WIDTH,DEPTH,GATED ...
"""

from __future__ import annotations

import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import mangle_type
from usage import usage

from octavo.kernels import gemv, ring_linear, split_linear
from octavo.kernels.tiles import gemv_tiles, invariant_tiles, ring_tiles, split_tiles

MULTIPROCESSORS = 132


def compiled(source_type, kernel, types: dict[str, str], constants: dict[str, object], options: dict[str, object]):
    """Pointers and what the kernels are specialised on are multiples of 16."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if signature[name].startswith("*") or name in ("K", "x_stride")
    }
    places = {(names.index(name),): value for name, value in constants.items()}
    source = source_type(kernel, signature, places, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def gemv_case(rows: int, width: int, depth: int, gated: bool):
    tiles = gemv_tiles(width, depth, gated, MULTIPROCESSORS)
    constants = {
        "ROWS": rows, "BN": tiles.outputs, "BK": tiles.depth, "WHOLE": depth <= tiles.depth,
        "GATED": gated, "SILU": True, "BIAS": False, "PDL": True,
    }  # fmt: skip
    types = dict.fromkeys(("x", "w", "bias", "y"), "*bf16")
    options = {"num_warps": tiles.warps, "launch_pdl": True}
    return tiles, 1, compiled(ASTSource, gemv._gemv_kernel, types, constants, options)


def invariant_case(rows: int, width: int, depth: int, gated: bool):
    tiles = invariant_tiles(width, depth, gated, MULTIPROCESSORS)
    is_many = -(-rows // tiles.rows) * -(-width // tiles.outputs) >= MULTIPROCESSORS
    return split_case(tiles.rows, width, depth, gated, tiles.splits if is_many else 1)


def split_case(rows: int, width: int, depth: int, gated: bool, in_turn: int = 1):
    tiles = split_tiles(rows, width, depth, gated, MULTIPROCESSORS)
    constants = {
        "BM": max(8, triton.next_power_of_2(rows)), "BN": tiles.outputs, "BK": tiles.depth, "SPLITS": tiles.splits // in_turn,
        "IN_TURN": in_turn, "GROUP": split_linear._GROUP, "EVEN": True, "GATED": gated, "SILU": True,
        "BIAS": False, "PDL": True, "PREFETCH": "1024",
    }  # fmt: skip
    types = dict.fromkeys(("x", "w", "bias", "y"), "*bf16") | {"partial": "*fp32", "counters": "*i32"}
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages, "launch_pdl": True}
    return tiles, 2, compiled(ASTSource, split_linear._split_kernel, types, constants, options)


def ring_case(rows: int, width: int, depth: int, gated: bool, tiles=None):
    tiles = tiles or ring_tiles(rows, width, gated)

    def box(height: int) -> str:
        layout = gl.NVMMASharedLayout.get_default_for([height, tiles.depth], gl.bfloat16)
        matrix = torch.empty(512, 512, dtype=torch.bfloat16)
        return mangle_type(TensorDescriptor.from_tensor(matrix, [height, tiles.depth], layout))

    constants = {
        "PARTS": tiles.parts, "STAGES": tiles.stages, "GATED": gated, "SILU": True, "BIAS": False, "PDL": True,
    }  # fmt: skip
    types = {"w_desc": box(16 * tiles.warps), "x_desc": box(tiles.rows), "y": "*bf16", "bias": "*bf16"}
    types |= {"partial": "*fp32", "counters": "*i32"}
    options = {"num_warps": tiles.warps, "launch_pdl": True}
    return tiles, tiles.programs, compiled(GluonASTSource, ring_linear._ring_kernel, types, constants, options)


def main() -> None:
    case = {"gemv": gemv_case, "split": split_case, "invariant": invariant_case, "ring": ring_case}[sys.argv[2]]
    for argument in sys.argv[3:]:
        rows, width, depth, gated = map(int, argument.split(","))
        tiles, programs, kernel = case(rows, width, depth, bool(gated))
        print(
            f"case={argument} {usage(kernel, sys.argv[1])} "
            f"programs={programs} tiles={str(tiles).replace(' ', '').replace('=', ':')}",
            flush=True,
        )


if __name__ == "__main__":
    main()
