"""Prefill attention over the paged cache on one GPU, against the device's limits and against PyTorch's own kernels in the same run.

Llama-3-8B's shape: 32 query heads, 8 key/value heads, head size 128, bf16, blocks of 16. Prefill is causal and counted as
`2 · B · H · S² · d` operations. Times are medians.

    python -m benches.gpu.attention
"""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from triton.testing import do_bench

from octavo.kernels import attention, hopper

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16
PREFILL = ((32, 512), (8, 2048), (1, 8192), (1, 16384))
LIMITS = {"scale": DIM**-0.5, "window": None, "softcap": None}


def median_ms(run) -> float:
    return float(do_bench(run, warmup=20, rep=100, return_mode="median"))


def paged(rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache in scattered blocks, and its block table."""
    columns = -(-length // BLOCK)
    cache = torch.randn(rows * columns + 1, 2, KV_HEADS, BLOCK, DIM, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(rows * columns, device="cuda", dtype=torch.int32).view(rows, columns) + 1
    return cache, table


def contiguous(cache: torch.Tensor, table: torch.Tensor) -> list[torch.Tensor]:
    """Keys and values `[B, H, L, d]` of the cache, repeated for each query head."""
    gathered = cache[table.long()].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
    return [part.repeat_interleave(HEADS // KV_HEADS, 1) for part in gathered]


def prefill_row(rows: int, length: int) -> None:
    cache, table = paged(rows, length)
    q = torch.randn(rows * length, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    starts = torch.arange(rows + 1, device="cuda", dtype=torch.int32) * length
    lengths = torch.full((rows,), length, device="cuda", dtype=torch.int32)
    out = torch.full_like(q, torch.nan)
    arguments = (q, cache, table, starts, lengths, out, rows * length)
    portable = median_ms(lambda: attention.prefill_attention(*arguments, **LIMITS))
    out.fill_(torch.nan)
    ours = median_ms(lambda: hopper.prefill_attention(*arguments, **LIMITS))
    keys, values = contiguous(cache, table)
    dense = q.view(rows, length, HEADS, DIM).transpose(1, 2)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        peer = scaled_dot_product_attention(dense, keys, values, is_causal=True)
        theirs = median_ms(lambda: scaled_dot_product_attention(dense, keys, values, is_causal=True))
    error = (out.view(rows, length, HEADS, DIM).transpose(1, 2).float() - peer.float()).norm() / peer.float().norm()
    work = 2 * rows * HEADS * length**2 * DIM / 1e9
    rates = "  ".join(
        f"{name} {work / ms:4.0f}" for name, ms in (("Gluon", ours), ("Triton", portable), ("cuDNN", theirs))
    )
    print(
        f"prefill {rows:3d} x {length:5d}  {rates} TFLOP/s  ratio {theirs / ours:.2f}  "
        f"of 989: {work / ours / 989:.0%}  error {error:.1e}",
        flush=True,
    )


def main() -> None:
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__)
    for rows, length in PREFILL:
        prefill_row(rows, length)


if __name__ == "__main__":
    main()
