"""Prefill attention over the paged cache on one GPU: the listed points, other heads and limits, and a ranking of cuts.

Llama-3-8B's shape: 32 query heads, 8 key/value heads, bf16, blocks of 16. Work is that of the visible scores, `4 · d` operations
each, of which plain causal attention has `S² / 2` a head. Times are medians of graph replays with a cold L2 cache; the plan of the
tiles, which all layers of a step share, is made beforehand, and `with plan` includes making it. Results are checked on random
tokens against fp32.

    python -m benches.gpu.prefill           # the listed points, then other heads and limits
    python -m benches.gpu.prefill --tune    # cuts of the Hopper kernel
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from triton.testing import do_bench

from benches.gpu.rows import Row, number, show
from octavo.kernels import attention, hopper, launch
from octavo.kernels.hopper import HopperTiles, tiles_for
from octavo.kernels.prefill_plan import PrefillPlan, prefill_plan

HEADS, KV_HEADS, BLOCK = 32, 8, 16
PEAK = 989
POINTS = ((32, 512), (8, 2048), (1, 8192), (1, 16384))
FLASH_ATTENTION_3 = {(32, 512): 233, (8, 2048): 479, (1, 8192): 628, (1, 16384): 663}
"""TFLOP/s measured on an H200 with 8 key/value heads."""
DEMANDED = {(32, 512): 340, (8, 2048): 540, (1, 8192): 630, (1, 16384): 665}
VARIANTS: tuple[dict[str, Any], ...] = (
    {"dim": 64}, {"dim": 80}, {"dim": 96}, {"dim": 256}, {"window": 1024}, {"softcap": 30.0}, {"window": 1024, "softcap": 30.0},
)  # fmt: skip
CUTS: dict[int, tuple[dict[str, Any], ...]] = {
    128: (
        {}, {"ping_pong": False}, {"q_buffers": 2}, {"q_buffers": 2, "ping_pong": False}, {"q_buffers": 2, "out_in_q": True},
        {"keys": 64, "stages": 4},
    ),
    64: ({}, {"ping_pong": False}, {"groups": 2}, {"groups": 2, "ping_pong": False}),
    256: ({}, {"ping_pong": False}),
}  # fmt: skip
SAMPLES = 64
COMPILERS = 12


def median_ms(run: Callable[[], object]) -> float:
    """Of a captured graph's replays."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return float(do_bench(graph.replay, warmup=10, rep=60, return_mode="median"))


class Case:
    """Rows of equal length without a prefix, in scattered blocks."""

    def __init__(
        self, rows: int, length: int, dim: int = 128, window: int | None = None, softcap: float | None = None
    ) -> None:
        columns = -(-length // BLOCK)
        self.rows, self.length, self.dim = rows, length, dim
        self.limits: dict[str, Any] = {"scale": dim**-0.5, "window": window, "softcap": softcap}
        shape = (rows * columns + 1, 2, KV_HEADS, BLOCK, dim)
        self.cache = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        self.table = torch.randperm(rows * columns, device="cuda", dtype=torch.int32).view(rows, columns) + 1
        self.q = torch.randn(rows * length, HEADS, dim, device="cuda", dtype=torch.bfloat16)
        self.starts = torch.arange(rows + 1, device="cuda", dtype=torch.int32) * length
        self.lengths = torch.full((rows,), length, device="cuda", dtype=torch.int32)
        self.out = torch.full_like(self.q, torch.nan)
        pairs = length**2 / 2
        if window is not None and window < length:
            pairs = window**2 / 2 + (length - window) * window
        self.work = 4 * rows * HEADS * pairs * dim / 1e9

    def plan(self, tiles: HopperTiles) -> PrefillPlan:
        return prefill_plan(self.starts, self.lengths, len(self.q), tile=tiles.rows)

    def ours(self, tiles: HopperTiles, plan: PrefillPlan | None) -> None:
        hopper.prefill_attention(*self.arguments(), **self.limits, tiles=tiles, plan=plan)

    def portable(self) -> None:
        attention.prefill_attention(*self.arguments(), **self.limits)

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int]:
        return self.q, self.cache, self.table, self.starts, self.lengths, self.out, len(self.q)

    def error(self) -> float:
        """`‖out − ref‖ / ‖ref‖` on random tokens of one row; nan where something was not written."""
        row = int(torch.randint(self.rows, ()))
        position = torch.randint(self.length, (SAMPLES,), device="cuda")
        kept = self.cache[self.table[row].long()].float().permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : self.length]
        keys, values = kept.repeat_interleave(HEADS // KV_HEADS, 1)
        token = row * self.length + position
        scores = torch.einsum("thd,hld->htl", self.q[token].float(), keys) * self.limits["scale"]
        if self.limits["softcap"] is not None:
            scores = self.limits["softcap"] * torch.tanh(scores / self.limits["softcap"])
        key = torch.arange(self.length, device="cuda")
        hidden = key > position[:, None]
        if self.limits["window"] is not None:
            hidden |= key <= position[:, None] - self.limits["window"]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        reference = torch.einsum("htl,hld->thd", weights, values)
        whole = self.out.isfinite().all()
        return float((self.out[token].float() - reference).norm() / reference.norm()) if whole else float("nan")

    def cudnn_ms(self) -> float:
        """On contiguous keys and values, repeated for each query head."""
        gathered = self.cache[self.table.long()].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
        keys, values = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in gathered)
        dense = self.q.view(self.rows, self.length, HEADS, self.dim).transpose(1, 2)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return median_ms(lambda: scaled_dot_product_attention(dense, keys, values, is_causal=True))

    def rate(self, tiles: HopperTiles) -> tuple[float, float]:
        """TFLOP/s and error of a cut."""
        plan = self.plan(tiles)
        self.out.fill_(torch.nan)
        ms = median_ms(lambda: self.ours(tiles, plan))
        return self.work / ms, self.error()


def compile_ahead(uses: list[tuple[dict[str, Any], HopperTiles]]) -> None:
    """All kernels at once: one after the other they take a quarter of a minute each."""
    cases = [Case(1, 512, **options) for options, _ in uses]
    with launch.compiling_ahead(COMPILERS):
        for case, (_, tiles) in zip(cases, uses, strict=True):
            case.ours(tiles, None)


def points() -> Iterator[Row]:
    """Against cuDNN in the same run and FA-3 as measured before."""
    compile_ahead([({}, tiles_for(128))])
    for rows, length in POINTS:
        case = Case(rows, length)
        tiles = tiles_for(case.dim)
        rate, error = case.rate(tiles)
        whole = case.work / median_ms(functools.partial(case.ours, tiles, None))
        portable = case.work / median_ms(case.portable)
        peers = {"cuDNN": case.work / case.cudnn_ms(), "FA-3": FLASH_ATTENTION_3[rows, length]}
        best = max(peers, key=peers.__getitem__)
        more = {"with plan": number(whole), "portable": number(portable), "cuDNN": number(peers["cuDNN"])}
        yield Row(
            f"prefill attention {rows} x {length}", rate, "TFLOP/s", DEMANDED[rows, length], peers[best], best, PEAK,
            {**more, "error": f"{error:.0e}"},
        )  # fmt: skip


def variants() -> Iterator[Row]:
    """Rates in percent of that of head size 128 without limits at the same lengths."""
    compile_ahead([(options, tiles_for(options.get("dim", 128))) for options in VARIANTS])
    for rows, length in ((8, 2048), (1, 8192)):
        base, _ = Case(rows, length).rate(tiles_for(128))
        for options in VARIANTS:
            case = Case(rows, length, **options)
            rate, error = case.rate(tiles_for(case.dim))
            name = " ".join(f"{key} {value}" for key, value in options.items())
            yield Row(
                f"prefill attention {rows} x {length}, {name}, of head size 128's rate", rate / base * 100, "% of rate", 80.0,
                more={"TFLOP/s": number(rate), "error": f"{error:.0e}"},
            )  # fmt: skip


def rows() -> Iterator[Row]:
    """The listed points, then other heads and limits."""
    torch.manual_seed(0)
    yield from points()
    yield from variants()


def tune() -> None:
    """Each cut at each listed point."""
    cuts = [(dim, dataclasses.replace(tiles_for(dim), **cut)) for dim, changes in CUTS.items() for cut in changes]
    compile_ahead([({"dim": dim}, tiles) for dim, tiles in cuts])
    for dim in CUTS:
        cases = [Case(rows, length, dim) for rows, length in POINTS]
        for its_dim, tiles in cuts:
            if its_dim == dim:
                results = [case.rate(tiles) for case in cases]
                rates = "  ".join(f"{rate:4.0f}" for rate, _ in results)
                print(f"dim {dim}  {rates} TFLOP/s  error {max(e for _, e in results):.1e}  {tiles}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tune", action="store_true")
    print(torch.cuda.get_device_name(), torch.__version__)
    if parser.parse_args().tune:
        tune()
    else:
        show(rows())


if __name__ == "__main__":
    main()
