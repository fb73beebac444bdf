"""Compiles the Gluon prefill kernel for sm_90 as its launcher would; prints registers, stack and shared memory.

python tests/kernels/compile_prefill.py FOLDER DIM,WINDOW,SOFTCAP[,FIELD=VALUE of HopperTiles, extras or pack] ...
"""

from __future__ import annotations

import dataclasses
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import mangle_type
from usage import usage

from octavo.kernels import hopper


def descriptor(*box: int) -> str:
    layout = gl.NVMMASharedLayout.get_default_for(list(box), gl.bfloat16)
    tensor = torch.empty(1024, *box[1:], dtype=torch.bfloat16)
    return mangle_type(TensorDescriptor.from_tensor(tensor, list(box), layout))


def compiled(dim: int, window: int, softcap: bool, tiles: hopper.HopperTiles, extras: bool, pack: int):
    """With log-sum-exps and sinks if `extras`; `pack` heads share a tile."""
    width = max(64, triton.next_power_of_2(dim))
    consumer_registers, producer_registers = tiles.registers
    constants = {
        "HEADS": 32 // pack, "PACK": pack,
        "STAGES": tiles.stages, "CONSUMERS": tiles.groups, "BM": 64, "BN": tiles.keys, "DIM": dim, "WINDOW": window,
        "SOFTCAP": softcap, "LSE": extras, "SINKS": extras, "Q_BUFFERS": tiles.q_buffers, "PING_PONG": tiles.ping_pong,
        "OUT_IN_Q": tiles.out_in_q, "PDL": True,
        "CONSUMER_REGISTERS": consumer_registers, "PRODUCER_REGISTERS": producer_registers,
    }  # fmt: skip
    names = hopper._kernel.arg_names
    box = descriptor(64 // pack, pack, width)
    types = {"q_desc": box, "out_desc": box, "kv_desc": descriptor(16, width)}
    types |= {"out": "*bf16", "lse": "*fp32", "sinks": "*bf16", "table": "*i32", "plan": "*i32"}
    types |= {"scale": "fp32", "softcap": "fp32"}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if signature[name].startswith("*") or name in ("kv_rows", "out_stride")
    }
    places = {(names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(hopper._kernel, signature, places, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "launch_pdl": True})


def main() -> None:
    for argument in sys.argv[2:]:
        dim, window, softcap, *changes = argument.split(",")
        fields = {name: int(value) for name, value in (change.split("=") for change in changes)}
        extras, pack = bool(fields.pop("extras", 0)), fields.pop("pack", 1)
        tiles = dataclasses.replace(hopper.tiles_for(int(dim)), **fields)
        kernel = compiled(int(dim), int(window), bool(int(softcap)), tiles, extras, pack)
        print(f"case={argument} {usage(kernel, sys.argv[1])}", flush=True)


if __name__ == "__main__":
    main()
