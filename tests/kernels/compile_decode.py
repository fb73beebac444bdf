"""Compiles the decode kernel for sm_90 as its launcher would; prints registers, stack, shared memory.

python tests/kernels/compile_decode.py FOLDER DIM,QUERIES,WINDOW,SOFTCAP[,FIELD=VALUE of DecodeTiles] ...
"""

from __future__ import annotations

import dataclasses
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from usage import usage

from octavo.kernels import decode
from octavo.kernels.decode_schedule import DecodeShape, DecodeTiles

ADDRESSES = {
    "q": "*bf16", "cache": "*bf16", "out": "*bf16", "table": "*i32", "starts": "*i32", "lengths": "*i32", "entries": "*i32",
    "counters": "*i32", "partial": "*fp32", "sums": "*fp32", "lse": "*fp32", "shared_out": "*fp32", "shared_lse": "*fp32",
}  # fmt: skip
# Multiples of 16 in every cache; the block table's may be any.
STRIDES = ("q_stride", "out_stride", "block_stride", "kv_stride", "head_stride")


def compiled(shape: DecodeShape, softcap: bool, tiles: DecodeTiles, shared: bool):
    """With log-sum-exps and, if `shared`, results for shared keys."""
    constants = decode.constants(shape, tiles, block=16, softcap=softcap, causal=True, shared=shared, lse=shared)
    constants["PDL"] = True
    names = decode._decode_kernel.arg_names
    types = ADDRESSES | {"scale": "fp32", "softcap": "fp32"}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if signature[name].startswith("*") or name in STRIDES
    }
    places = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(decode._decode_kernel, signature, places, attributes)
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages, "launch_pdl": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def main() -> None:
    for argument in sys.argv[2:]:
        dim, queries, window, softcap, *changes = argument.split(",")
        fields = {name: int(value) for name, value in (change.split("=") for change in changes)}
        shared = bool(fields.pop("shared", 0))
        shape = DecodeShape(fields.pop("heads", 32), 8, int(dim), torch.bfloat16, int(queries), int(window) or None)
        tiles = dataclasses.replace(shape.tiles(fields.pop("rows", 1)), **fields)
        kernel = compiled(shape, bool(int(softcap)), tiles, shared)
        print(f"case={argument} {usage(kernel, sys.argv[1])}", flush=True)


if __name__ == "__main__":
    main()
