"""Which cut of decode attention is fastest at each batch and length: the figures behind `DecodeTiles`' defaults.

python -m benches.gpu.decode_tiles
"""

from __future__ import annotations

import itertools

import torch
from triton.testing import do_bench

from benches.gpu.attention import DECODE, DIM, HEADS, LIMITS, paged
from octavo.kernels.attention import DecodeTiles, decode_attention

CUTS = [
    DecodeTiles(*cut)
    for cut in itertools.product((32, 64, 128), (2, 4, 8), (2, 3, 4), (1.0, 2.0, 4.0))
    if cut[:2] != (32, 8)
]


def time_us(rows: int, length: int, tiles: DecodeTiles) -> float:
    """Median of a graph's replays."""
    cache, table = paged(rows, length)
    q = torch.randn(rows, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    starts = torch.arange(rows + 1, device="cuda", dtype=torch.int32)
    lengths = torch.full((rows,), length, device="cuda", dtype=torch.int32)
    out = torch.empty_like(q)

    def run() -> None:
        decode_attention(q, cache, table, starts, lengths, out, 1, length, **LIMITS, tiles=tiles)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return float(do_bench(graph.replay, warmup=3, rep=15, return_mode="median")) * 1e3


def main() -> None:
    total: dict[DecodeTiles, float] = dict.fromkeys(CUTS, 0.0)
    for rows, length in DECODE:
        times = {tiles: time_us(rows, length, tiles) for tiles in CUTS}
        best = sorted(times, key=times.__getitem__)[:4]
        for tiles, us in times.items():
            total[tiles] += us / times[best[0]]
        shown = "  ".join(f"{t.keys}/{t.warps}/{t.stages}/{t.fill:g}: {times[t]:.1f}" for t in best)
        print(f"{rows:4d} x {length:5d}  keys/warps/stages/fill: us   {shown}", flush=True)
    for tiles in sorted(total, key=total.__getitem__)[:5]:
        print(f"over all points {total[tiles] / len(DECODE):.3f} times the best of each: {tiles}")


if __name__ == "__main__":
    main()
