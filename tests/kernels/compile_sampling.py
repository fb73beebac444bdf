"""Compiles the sampling kernels for sm_90 as their launcher would; prints registers and stack of each.

python tests/kernels/compile_sampling.py FOLDER VOCABULARY,DTYPE ...
"""

from __future__ import annotations

import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from usage import usage

from octavo.kernels import sampling
from octavo.kernels.sampling import SamplingKernels

WORDS = (
    "bits", "slots", "positions", "token_ids", "ints", "keys", "mask", "changed", "places", "count", "tokens", "tasks",
    "num_sampled", "which", "ids", "ranks",
)  # fmt: skip
POINTERS = dict.fromkeys(WORDS, "*i32") | dict.fromkeys(("floats", "overlay", "blocks", "values", "logprobs"), "*fp32")
MULTIPLES = {"vocab", "logits_stride", "keys_stride"}


REGISTERS = {sampling.scan_kernel: sampling._SCAN_REGISTERS, sampling.choose_kernel: sampling._CHOOSE_REGISTERS}


def compiled(kernel, dtype: str, constants: dict[str, object]):
    """Pointers, and what the kernels are specialised on, are multiples of 16."""
    names = kernel.arg_names
    types = POINTERS | {"logits": f"*{dtype}", "out": "*i64", "greedy_below": "fp32"}
    if kernel is sampling.penalise_kernel:
        types["overlay"] = "*i32"
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if signature[name].startswith("*") or name in MULTIPLES
    }
    places = {(names.index(name),): value for name, value in constants.items()}
    options = {"num_warps": sampling._WARPS, "launch_pdl": True, "enable_fp_fusion": kernel is sampling.scan_kernel}
    if kernel in REGISTERS:
        options["maxnreg"] = REGISTERS[kernel]
    return triton.compile(
        ASTSource(kernel, signature, places, attributes), target=GPUTarget("cuda", 90, 32), options=options
    )


def constants_of(kernel, vocab_size: int) -> dict[str, object]:
    own = SamplingKernels(vocab_size, 1, torch.device("cpu"), 1e-5)
    known = {
        "TILE": own._tile, "BLOCK": own._block, "BLOCKS": own._blocks, "PADDED": own._padded, "SIZE": sampling._CANDIDATES,
        "FEW": sampling._FEW, "FEW_BLOCKS": sampling._FEW_BLOCKS, "H": sampling._HISTORY, "PDL": True, "TOP": 32,
    }  # fmt: skip
    return {name: value for name, value in known.items() if name in kernel.arg_names}


def main() -> None:
    kernels = {name: found for name, found in vars(sampling).items() if name.endswith("_kernel")}
    for argument in sys.argv[2:]:
        vocab_size, dtype = argument.split(",")
        for name, kernel in kernels.items():
            found = compiled(kernel, dtype, constants_of(kernel, int(vocab_size)))
            print(
                f"case={argument} {name}: {usage(found, sys.argv[1])}",
                flush=True,
            )


if __name__ == "__main__":
    main()
