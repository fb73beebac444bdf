"""The generations of attention on one GPU: scores in memory, FlashAttention-1, -2 and -3, on the same tokens.

python -m benches.gpu.story

Llama-3-8B's shape, causal, bf16: 32 query and 8 key/value heads of size 128, 16,384 tokens in sequences of 1k to 16k, as the papers
have it. The first two read contiguous keys and values, the others a paged cache with blocks of 16. `naive` is plain PyTorch with
fp32 scores in memory; FA-1 has its paper's order of loops, a head of a sequence a program; FA-2 is the portable kernel, FA-3 the
Hopper kernel. Memory is what torch had allocated at most, inputs included.

Bytes are counted: what the programs read and write outside of their registers and shared memory, of which caches catch a part.
Where Nsight Compute is installed and may count, what came from and went to HBM is measured beside it.
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Final

import torch

from benches.gpu.prefill import HEADS, KV_HEADS, PEAK, Case, compile_ahead, median_ms
from benches.gpu.rows import Row, number, show
from benches.gpu.story_kernels import counted_bytes, flash_1, naive
from octavo.kernels.hopper import tiles_for

TOKENS: Final = 16_384
LENGTHS: Final = (1024, 2048, 4096, 8192, 16384)
MEASURED_LENGTHS: Final = (1024, 4096, 16384)
"""Where HBM bytes are measured: each takes a process."""
GENERATIONS: Final = ("naive", "FA-1", "FA-2", "FA-3")
DEMANDED_OF_PEAK: Final = 0.65
_METRICS: Final = ("dram__bytes_read.sum", "dram__bytes_write.sum")
_UNITS: Final = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12}
_PORTABLE_TILE: Final = 128


def contiguous(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys, values and outputs of the case, `[B, S, H or K, d]`."""
    keys, values = case.cache[case.table.long()].permute(2, 0, 1, 4, 3, 5).flatten(2, 3)[:, :, : case.length]
    shape = (case.rows, case.length, HEADS, case.dim)
    return case.q.view(shape), keys.contiguous(), values.contiguous(), case.out.view(shape)


def runner(generation: str, case: Case) -> Callable[[], None]:
    """Writes the case's outputs."""
    scale = case.limits["scale"]
    if generation in ("naive", "FA-1"):
        return functools.partial(naive if generation == "naive" else flash_1, *contiguous(case), scale)
    if generation == "FA-2":
        return case.portable
    tiles = tiles_for(case.dim)
    return functools.partial(case.ours, tiles, case.plan(tiles))


def bytes_of(generation: str, case: Case) -> float:
    """Counted."""
    tile = tiles_for(case.dim).rows if generation == "FA-3" else _PORTABLE_TILE
    return counted_bytes(generation, case.rows, case.length, HEADS, KV_HEADS, case.dim, tile)


def milliseconds(generation: str, run: Callable[[], None]) -> float:
    """The median; scores in memory are too large for the second copy that a graph's pool would keep."""
    if generation != "naive":
        return median_ms(run)
    times = []
    for _ in range(4):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times[1:])[1]


def peak_bytes(run: Callable[[], None]) -> int:
    """Allocated at most while it runs."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def hbm_bytes(generation: str, length: int) -> float | None:
    """Measured by Nsight Compute in a process of its own; None where that cannot be had."""
    tool = shutil.which("ncu")
    if tool is None:
        return None
    command = [tool, "--metrics", ",".join(_METRICS), "--csv", "--profile-from-start", "off"]
    command += [sys.executable, "-m", "benches.gpu.story", "--one", generation, str(length)]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return None
    return total_bytes(said)


def total_bytes(said: str) -> float | None:
    """Sum of the metrics of all kernels in Nsight Compute's CSV; None if there are none."""
    lines = [line for line in said.splitlines() if line.startswith('"')]
    found = [row for row in csv.DictReader(lines) if row.get("Metric Name") in _METRICS]
    if not found:
        return None
    return sum(float(row["Metric Value"].replace(",", "")) * _UNITS[row["Metric Unit"]] for row in found)


def generation_row(generation: str, length: int) -> Row:
    """One figure of the table."""
    case = Case(TOKENS // length, length)
    run = runner(generation, case)
    case.out.fill_(torch.nan)
    peak = peak_bytes(run)
    error = case.error()
    rate = case.work / milliseconds(generation, run)
    more = {"memory, GB": number(peak / 1e9), "bytes counted, GB": number(bytes_of(generation, case) / 1e9)}
    del case, run
    torch.cuda.empty_cache()
    measured = hbm_bytes(generation, length) if length in MEASURED_LENGTHS else None
    if measured is not None:
        more["HBM bytes measured, GB"] = number(measured / 1e9)
    demanded = DEMANDED_OF_PEAK * PEAK if (generation, length) == (GENERATIONS[-1], LENGTHS[-1]) else None
    return Row(
        f"{generation}, {TOKENS // length} x {length}", rate, "TFLOP/s", demanded, limit=PEAK,
        more={**more, "error": f"{error:.0e}"},
    )  # fmt: skip


def rows() -> Iterator[Row]:
    """All generations at all lengths, and by how much each is faster than the one before at least."""
    torch.manual_seed(0)
    compile_ahead([({}, tiles_for(128))])
    rates: dict[str, list[float]] = {}
    for generation in GENERATIONS:
        for length in LENGTHS:
            row = generation_row(generation, length)
            rates.setdefault(generation, []).append(row.measured)
            yield row
    for before, after in itertools.pairwise(GENERATIONS):
        least = min(new / old for old, new in zip(rates[before], rates[after], strict=True))
        yield Row(f"{after} / {before}, least over the lengths", least, "x", 1.0)


def run_once(generation: str, length: int) -> None:
    """For Nsight Compute: counts what one run does, after another that is not counted."""
    run = runner(generation, Case(TOKENS // length, length))
    run()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    run()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=2, metavar=("GENERATION", "LENGTH"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        run_once(args.one[0], int(args.one[1]))
    else:
        show(rows())


if __name__ == "__main__":
    main()
