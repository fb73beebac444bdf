"""Decode attention over the paged cache on one GPU, against FA-3's times on such a GPU (docs/performance.md).

Llama-3-8B's shape: 32 query heads, 8 key/value heads, head size 128, bf16, blocks of 16. Times are a call's share of a
graph of 16 calls, one behind the other as layers are, each with keys and values that are not in the L2 cache; "alone" is a graph of
one call, whose own launch takes some 6 us of it.

    python -m benches.gpu.decode [--tune]
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import scaled_dot_product_attention
from triton.testing import do_bench

from benches.gpu.limits import BYTES_PER_SECOND
from benches.gpu.rows import Row, number, show
from octavo.kernels import launch
from octavo.kernels.cascade import cascade_attention, cascade_schedule
from octavo.kernels.decode import decode_attention
from octavo.kernels.decode_schedule import DecodeShape, DecodeTiles, decode_schedule

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16
# Rows, length, and FA-3's microseconds.
POINTS = (
    (1, 128, None), (1, 1024, 11.9), (1, 8192, 16.8), (1, 65536, 74.5), (16, 4096, 71.4),
    (64, 128, None), (64, 1024, 77.8), (64, 4096, 251.0), (128, 4096, 491.0),
)  # fmt: skip
SHAPE = DecodeShape(HEADS, KV_HEADS, DIM, torch.bfloat16, max_query_len=1)
CUTS = (
    (32, 2, 4), (64, 2, 3), (64, 2, 4), (64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 4, 5),
    (128, 4, 2), (128, 4, 3), (128, 8, 2), (128, 8, 3),
)  # fmt: skip
"""Keys, warps and stages: what is compiled; programs and the least number of tiles are not."""
SHARED_MEMORY = 227 << 10
FILLING = 400 << 20
IN_A_ROW = 16
"""Launches of a graph, as a step has one for each layer: a single one's time is the graph's too."""


@dataclass(frozen=True, slots=True)
class Case:
    """A step of decode rows; `name` and what is known of it."""

    name: str
    q: torch.Tensor
    cache: torch.Tensor
    table: torch.Tensor
    """Of the first layer."""
    starts: torch.Tensor
    lengths: torch.Tensor
    peer_us: float | None = None
    layers: int = 1
    """Whose blocks follow each other in the cache: enough to fill the L2 cache several times."""

    def run(self, tiles: DecodeTiles | None = None, out: torch.Tensor | None = None) -> Callable[[], None]:
        """The attention, of the next layer in each call; its schedule is made now."""
        schedule = decode_schedule(self.starts, self.lengths, SHAPE, tiles=tiles)
        out = torch.empty_like(self.q) if out is None else out
        tables = itertools.cycle([self.table + layer * self.table.numel() for layer in range(self.layers)])
        return lambda: decode_attention(
            self.q, self.cache, next(tables), self.starts, self.lengths, out, schedule, scale=DIM**-0.5, softcap=None
        )

    def expected(self) -> torch.Tensor:
        """By PyTorch, on keys and values in a row."""
        kept = self.cache[self.table.long()].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
        keys, values = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in kept)
        seen = torch.arange(keys.shape[2], device="cuda") < self.lengths[:, None]
        return scaled_dot_product_attention(self.q[:, :, None], keys, values, attn_mask=seen[:, None, None])[:, :, 0]


def case(name: str, lengths: list[int], shared: int = 0, peer_us: float | None = None) -> Case:
    """Scattered blocks; the first `shared` keys are in the same ones for all rows."""
    rows, columns = len(lengths), -(-max(lengths) // BLOCK)
    layers = max(1, min(IN_A_ROW, FILLING // (4 * sum(lengths) * KV_HEADS * DIM)))
    table = torch.randperm(rows * columns, device="cuda", dtype=torch.int32).view(rows, columns)
    table[:, : shared // BLOCK] = table[0, : shared // BLOCK]
    cache = torch.randn(layers * rows * columns, 2, KV_HEADS, BLOCK, DIM, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(rows, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    starts = torch.arange(rows + 1, device="cuda", dtype=torch.int32)
    return Case(name, q, cache, table, starts, torch.tensor(lengths, device="cuda", dtype=torch.int32), peer_us, layers)


def cases() -> list[Case]:
    """The listed points, and one of many lengths; a few gigabytes together."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randint(100, 2001, (256,), generator=generator).tolist()
    points = [case(f"{rows} x {length}", [length] * rows, peer_us=us) for rows, length, us in POINTS]
    return [*points, case("256 x 100..2000", mixed)]


def captured(run: Callable[[], object], times: int = 1) -> Callable[[], None]:
    """A graph of so many calls."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            run()
    return graph.replay


def median_us(replay: Callable[[], None], rep: int = 60) -> float:
    return float(do_bench(replay, warmup=5, rep=rep, return_mode="median")) * 1e3


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.float() - expected.float()).norm() / expected.float().norm())


def case_row(step: Case) -> Row:
    """A point, against FA-3; the limit is one read of the keys and values."""
    out = torch.full_like(step.q, torch.nan)
    us = median_us(captured(step.run(), IN_A_ROW)) / IN_A_ROW
    alone = median_us(captured(step.run()))
    step.run(out=out)()
    limit = 4 * int(step.lengths.sum()) * KV_HEADS * DIM / BYTES_PER_SECOND * 1e6
    peer = step.peer_us
    wanted = 14.0 if step.name == "1 x 8192" else None if peer is None else 1.05 * peer
    return Row(
        f"decode attention {step.name}", us, "us", wanted, peer, "" if peer is None else "FA-3", limit,
        {"alone, us": number(alone), "error": f"{error(out, step.expected()):.0e}"},
    )  # fmt: skip


def schedule_row(rows: int) -> Row:
    lengths = torch.full((rows,), 1000, device="cuda", dtype=torch.int32)
    starts = torch.arange(rows + 1, device="cuda", dtype=torch.int32)
    us = median_us(captured(lambda: decode_schedule(starts, lengths, SHAPE)))
    return Row(f"schedule of {rows} rows, once a step", us, "us")


def cascade_rows(rows: int, shared: int, own: int) -> Iterator[Row]:
    step = case(f"{rows} x ({shared} + {own})", [shared + own] * rows, shared=shared)
    arguments = (step.q, step.cache, step.table, step.starts, step.lengths)
    limits = {"scale": DIM**-0.5, "softcap": None}

    def cut() -> object:
        return cascade_schedule(step.table, step.starts, step.lengths, SHAPE, block_size=BLOCK, num_tokens=rows)

    schedule, out, alone = cut(), torch.full_like(step.q, torch.nan), torch.full_like(step.q, torch.nan)
    together = median_us(captured(lambda: cascade_attention(*arguments, out, schedule, **limits)))
    apart = median_us(captured(step.run(out=alone)))
    more = {"schedule, us": number(median_us(captured(cut))), "error": f"{error(out, alone):.0e}"}
    yield Row(f"decode attention {step.name}, every row alone", apart, "us")
    yield Row(f"decode attention {step.name}, cascade", together, "us", more=more)
    if shared:
        yield Row(f"decode attention {step.name}, alone / cascade", apart / together, "x", 3.0)


def rows() -> Iterator[Row]:
    """All points but the ranking of cuts."""
    torch.manual_seed(0)
    steps = cases()
    with launch.compiling_ahead(16):
        steps[0].run()()
    yield from map(case_row, steps)
    yield from map(schedule_row, (1, 256))
    yield from cascade_rows(64, 8192, 128)
    yield from cascade_rows(64, 0, 1024)


def cuts() -> list[DecodeTiles]:
    """Those that fit a multiprocessor's shared memory; at least 64, 128 or 256 keys a program."""
    found = []
    for (keys, warps, stages), programs, least in itertools.product(CUTS, (1, 2, 3, 4), (64, 128, 256)):
        shared = programs * (4 * keys * DIM * (stages - 1) + (8 << 10))
        if shared <= SHARED_MEMORY and programs * warps >= 4 and least >= keys:
            found.append(DecodeTiles(keys, warps, stages, programs, least // keys))
    return found


def tune(steps: list[Case]) -> None:
    tried = cuts()
    with launch.compiling_ahead(16):
        for keys, warps, stages in CUTS:
            steps[0].run(replace(tried[0], keys=keys, warps=warps, stages=stages))()
    ratio = dict.fromkeys(tried, 0.0)
    for step in steps:
        times = {tiles: median_us(captured(step.run(tiles), IN_A_ROW), rep=6) / IN_A_ROW for tiles in tried}
        best = sorted(times, key=times.__getitem__)
        for tiles, us in times.items():
            ratio[tiles] += us / times[best[0]] / len(steps)
        shown = "  ".join(f"{t.keys}/{t.warps}/{t.stages}/{t.programs}/{t.least}: {times[t]:.1f}" for t in best[:5])
        print(f"{step.name:>16}  keys/warps/stages/programs/least: us   {shown}", flush=True)
    for tiles in sorted(ratio, key=ratio.__getitem__)[:8]:
        print(f"over all points {ratio[tiles]:.3f} times the best of each: {tiles}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tune", action="store_true", help="rank the cuts")
    print(torch.cuda.get_device_name(), torch.__version__)
    if parser.parse_args().tune:
        torch.manual_seed(0)
        tune(cases())
    else:
        show(rows())


if __name__ == "__main__":
    main()
