"""Compiles portable attention and FlashAttention-1's loops for sm_90; prints registers, stack and shared memory of each.

python tests/kernels/compile_attention.py FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import triton
from benches.gpu import story_kernels
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from usage import usage

from octavo.kernels import attention

STRIDES = ("q_stride", "block_stride", "kv_stride", "head_stride", "heads")
"""Multiples of 16 in every model: kernels are specialised on that."""


def compiled(kernel, types: dict[str, str], constants: dict[str, object], options: dict[str, int]):
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if signature[name].startswith("*") or name in STRIDES
    }
    places = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, places, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def kernels() -> Iterator[tuple[str, object]]:
    """Named, of head size 128 in bf16."""
    paged = dict.fromkeys(("q", "cache", "out"), "*bf16") | dict.fromkeys(("table", "starts", "lengths"), "*i32")
    for tile, warps in ((128, 8), (64, 4)):
        constants = {
            "GROUP": 4, "BLOCK": 16, "D": 128, "DIM": 128, "BM": tile, "BN": 64,
            "WINDOW": 0, "SOFTCAP": False, "PRECISION": "tf32", "LEAST": 1,
        }  # fmt: skip
        types = paged | {"scale": "fp32", "softcap": "fp32"}
        options = {"num_warps": warps, "num_stages": 3}
        yield f"portable,{tile}", compiled(attention._prefill_kernel, types, constants, options)
    types = (
        dict.fromkeys(("q", "k", "v"), "*bf16") | dict.fromkeys(("out", "best", "total"), "*fp32") | {"scale": "fp32"}
    )
    constants = {
        "GROUP": 4, "D": 128, "BR": story_kernels.BLOCK_ROWS, "BC": story_kernels.BLOCK_COLUMNS, "PRECISION": "tf32",
    }  # fmt: skip
    options = {"num_warps": story_kernels.WARPS, "num_stages": story_kernels.STAGES}
    yield "FA-1", compiled(story_kernels._flash_1_kernel, types, constants, options)


def main() -> None:
    for name, found in kernels():
        wgmma = found.asm["ptx"].count("wgmma.mma_async")
        print(
            f"kernel={name} {usage(found, sys.argv[1])} wgmma={wgmma}",
            flush=True,
        )


if __name__ == "__main__":
    main()
