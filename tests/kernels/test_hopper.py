"""The Gluon prefill kernel: against the portable one on a Hopper GPU; compiled without spills everywhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

hopper = pytest.importorskip("octavo.kernels.hopper", reason="Gluon of Triton 3.6")
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
ROWS = {
    "one_token": [(0, 1)],
    "whole_tiles": [(0, 256), (0, 128)],
    "uneven": [(0, 1), (0, 63), (0, 200), (0, 129)],
    "prefixes": [(5, 17), (1000, 300), (130, 128), (64, 1)],
    "empty_rows": [(0, 40), (16, 0), (0, 0), (7, 90)],
}


def case(rows: list[tuple[int, int]], dim: int, block: int, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """Rows of (tokens in the cache before, new tokens), in scattered blocks of which the last ones are not full."""
    torch.manual_seed(seed)
    heads, kv_heads = 6, 2
    columns = [-(-(old + new) // block) for old, new in rows]
    cache = torch.randn(sum(columns) + 3, 2, kv_heads, block, dim, device="cuda", dtype=dtype)
    ids = (torch.randperm(sum(columns), device="cuda", dtype=torch.int32) + 1).split(columns)
    table = torch.zeros(len(rows), max(1, *columns), device="cuda", dtype=torch.int32)
    for row, blocks in zip(table, ids, strict=True):
        row[: len(blocks)] = blocks
    starts = torch.tensor([0, *[new for _, new in rows]], device="cuda", dtype=torch.int32).cumsum(0).int()
    tokens = int(starts[-1])
    # The kernel may get rows that do not begin with the step's first token.
    before = 3
    q = torch.randn(tokens + before, heads, dim, device="cuda", dtype=dtype)
    return {
        "q": q,
        "kv_cache": cache,
        "block_table": table,
        "query_start_loc": starts + before,
        "seq_lens": torch.tensor([old + new for old, new in rows], device="cuda", dtype=torch.int32),
        "num_tokens": tokens,
    }


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(
    ("dim", "block", "dtype"), [(64, 32, torch.float16), (128, 16, torch.bfloat16), (256, 64, torch.bfloat16)]
)
@pytest.mark.parametrize("options", [{}, {"window": 100}, {"softcap": 20.0}, {"window": 37, "softcap": 5.0}], ids=str)
def test_the_hopper_kernel_equals_the_portable_one(options, dim, block, dtype):
    from octavo.kernels import attention

    for seed, rows in enumerate(ROWS.values()):
        arguments = case(rows, dim, block, dtype, seed)
        limits = {"scale": dim**-0.5, "window": None, "softcap": None, **options}
        assert hopper.supports(arguments["q"], block)
        expected, result = (torch.full_like(arguments["q"], 7.0) for _ in range(2))
        attention.prefill_attention(out=expected, **arguments, **limits)
        hopper.prefill_attention(out=result, **arguments, **limits)
        torch.testing.assert_close(result.float(), expected.float(), atol=2e-2, rtol=2e-2)
        assert (result[:3] == 7.0).all(), "tokens of other rows were written"


@pytest.mark.parametrize(
    ("dim", "window", "softcap"), [(64, 0, False), (128, 0, False), (256, 0, False), (128, 512, True)]
)
def test_it_compiles_for_sm_90_within_its_registers(tmp_path: Path, dim: int, window: int, softcap: bool) -> None:
    # In a process whose kernels are compiled, not interpreted.
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, str(tmp_path / "kernel.cubin"), str(dim), str(window), str(int(softcap))]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    shared, usage = result.stdout.split("\n", 1)
    # What does not fit into registers goes to the stack; two words of it are saved around the loop, not in it.
    assert int(re.search(r"REG:\d+ STACK:(\d+)", usage)[1]) <= 8
    assert int(shared) <= 227 << 10


def compile_for_sm_90(binary: Path, dim: int, window: int, softcap: bool) -> None:
    """Writes the machine code; prints its shared memory in bytes, then its use of registers."""
    import triton
    from triton.backends import nvidia
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    from triton.runtime.jit import mangle_type

    def descriptor(rows: int) -> str:
        layout = gl.NVMMASharedLayout.get_default_for([rows, dim], gl.bfloat16)
        return mangle_type(
            TensorDescriptor.from_tensor(torch.empty(1024, dim, dtype=torch.bfloat16), [rows, dim], layout)
        )

    constants = {
        "STAGES": 2,
        "BM": 64,
        "BN": 128 if dim <= 128 else 64,
        "D": dim,
        "WINDOW": window,
        "SOFTCAP": softcap,
        "CONSUMER_REGISTERS": 240,
        "PRODUCER_REGISTERS": 24,
        "LEAST": 2,
    }
    names = hopper._kernel.arg_names
    signature = dict.fromkeys(names, "i32")
    signature |= {"q_desc": descriptor(64), "out_desc": descriptor(64), "kv_desc": descriptor(16), "out": "*bf16"}
    signature |= {"table": "*i32", "starts": "*i32", "lengths": "*i32", "scale": "fp32", "softcap": "fp32"}
    signature |= dict.fromkeys(constants, "constexpr")
    places = {(names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(hopper._kernel, signature, places, {})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    binary.write_bytes(compiled.asm["cubin"])
    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    print(compiled.metadata.shared)
    print(subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True, check=True).stdout)


if __name__ == "__main__":
    compile_for_sm_90(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), bool(int(sys.argv[4])))
