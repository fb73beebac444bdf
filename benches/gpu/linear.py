"""Matrix products of few rows on one GPU, against cuBLAS in the same run.

Every figure is a replay of a CUDA graph that goes through copies of the weights larger than the L2 cache together; TB/s are of the
weights alone. Each kernel's result is compared with fp64 on fresh random operands. Our `gate_up` includes the activation, that of
cuBLAS does not.

    python -m benches.gpu.linear            # cuBLAS, ours, ours with dependent launches; and all products of a Llama-3-8B step
    python -m benches.gpu.linear --tune     # the best cuts of each shape and number of rows
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear as cublas

from benches.gpu.limits import BYTES_PER_SECOND, OPERATIONS_PER_SECOND
from benches.gpu.rows import Row, number, show
from octavo.kernels import fused, launch
from octavo.kernels.linear import gated_linear, linear
from octavo.kernels.tiles import GemvTiles, RingTiles, SplitTiles, Tiles, power_of_two

LLAMA = {
    "qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336), "head": (128256, 4096),
}  # fmt: skip
QWEN = {
    "qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072), "head": (151936, 1024),
}  # fmt: skip
MODELS = {"llama-3-8b": LLAMA, "qwen3-0.6b": QWEN}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LAYERS = 32
WEIGHT_BYTES = 384 << 20
COMPILERS = 14
DTYPE = torch.bfloat16


def median_ms(run: Callable[[], object], repeat: int = 7) -> float:
    """Of a captured graph's replays, after two."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeat + 3)]
    for mark in marks:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(marks[2:]))
    return times[len(times) // 2]


class Case:
    """One shape with one number of rows, and copies of its weights that exceed the cache."""

    def __init__(self, name: str, outputs: int, depth: int):
        self.gated = name == "gate_up"
        self.bytes = outputs * depth * DTYPE.itemsize
        count = max(1, min(48, -(-WEIGHT_BYTES // self.bytes)))
        self.weights = [torch.randn(outputs, depth, device="cuda", dtype=DTYPE) * depth**-0.5 for _ in range(count)]
        self.depth, self.outputs = depth, outputs

    def draw(self, rows: int) -> None:
        """Fresh `x`, and the product by fp64."""
        self.x = torch.randn(rows, self.depth, device="cuda", dtype=DTYPE)
        y = torch.cat([self.x.double() @ part.double().T for part in self.weights[-1].split(8192)], dim=1)
        if self.gated:
            gate, up = y.chunk(2, dim=1)
            y = torch.nn.functional.silu(gate) * up
        self.reference = y

    def ours(self, weight: Tensor, tiles: Tiles | None = None) -> Tensor:
        return gated_linear(self.x, weight, True, tiles=tiles) if self.gated else linear(self.x, weight, tiles=tiles)

    def error(self, tiles: Tiles | None = None) -> float:
        """Relative, in the norm; memory that the result may get is filled with NaN before."""
        torch.full_like(self.reference, torch.nan, dtype=DTYPE)
        return float((self.ours(self.weights[-1], tiles).double() - self.reference).norm() / self.reference.norm())

    def us(self, run: Callable[[Tensor], object]) -> float:
        """Of one product."""
        return median_ms(lambda: [run(weight) for weight in self.weights]) * 1e3 / len(self.weights)


def ring_cuts(rows: int, gated: bool) -> list[RingTiles]:
    """Those worth a try."""
    if rows > 64:
        wide = [(rows, 1, 64, 4, 8), (128, 2, 64, 4, 8), (128, 1, 64, 6, 8), (128, 2, 64, 3, 4)]
        wide += [(128, 1, 64, 4, 4), (64, 2, 64, 5, 8), (128, 1, 128, 3, 8)]
        cuts = [(*cut, programs) for cut in wide for programs in ((1, 2) if cut[4] == 4 else (1,))]
        return [RingTiles(*cut) for cut in dict.fromkeys(cuts) if cut[1] == 2 or not gated]
    tile = max(8, power_of_two(rows))
    cuts = []
    for parts, depth, warps, memory, programs in (
        (1, 64, 4, 108, (1, 2)),
        (1, 128, 4, 108, (1, 2)),
        (2, 64, 4, 108, (1, 2)),
        (2, 64, 4, 72, (2, 3)),
        (2, 128, 4, 108, (1, 2)),
        (1, 64, 4, 52, (3, 4)),
        (2, 64, 8, 108, (1, 2)),
        (2, 64, 8, 220, (1,)),
    ):
        if gated and parts == 1:
            continue
        stages = (memory << 10) // RingTiles(tile, parts, depth, 1, warps, 1).stage_bytes()
        if stages >= 2:
            cuts += [RingTiles(tile, parts, depth, min(stages, 12), warps, each) for each in programs]
    return cuts


def gemv_cuts(depth: int, gated: bool) -> list[GemvTiles]:
    """Those worth a try."""
    chunk = power_of_two(depth)
    sizes = {1024: ((4, 2), (8, 4), (16, 4)), 2048: ((2, 2), (4, 4), (8, 4)), 4096: ((2, 2), (2, 4), (4, 4), (8, 8))}
    cuts = sizes.get(chunk, ((1, 4), (1, 8), (2, 8)))
    return [GemvTiles(max(1, n // 2) if gated else n, chunk, warps) for n, warps in cuts]


def split_cuts(gated: bool) -> list[SplitTiles]:
    """Those worth a try."""
    shapes = ((64, 64, 4 if gated else 6), (64, 128, 2 if gated else 4)) + (() if gated else ((128, 64, 4),))
    return [SplitTiles(*shape, 4, splits) for shape in shapes for splits in (1, 4)]


def cuts_of(rows: int, depth: int, gated: bool) -> list[Tiles]:
    """All candidates for these rows."""
    cuts: list[Tiles] = list(ring_cuts(rows, gated))
    if rows <= 4:
        cuts += gemv_cuts(depth, gated) if rows == 1 else gemv_cuts(depth, gated)[1:3]
    if rows in (16, 64):
        cuts += split_cuts(gated)
    return cuts


def compile_share(share: int) -> None:
    """Every kernel of the sweep whose number fits, run once on a small matrix, so that the disk holds it."""
    jobs = {}
    for shapes in MODELS.values():
        for (name, (_, depth)), rows in itertools.product(shapes.items(), ROWS):
            for tiles in cuts_of(rows, depth, name == "gate_up"):
                # Everything the compiler sees: programs and splits above one are plain arguments.
                exact = rows if isinstance(tiles, GemvTiles) else 0
                key = str(tiles).rsplit("programs", 1)[0]
                jobs.setdefault((key, name == "gate_up", exact), (tiles, rows, depth, name == "gate_up"))
    for tiles, rows, depth, gated in list(jobs.values())[share::COMPILERS]:
        x = torch.randn(rows, depth, device="cuda", dtype=DTYPE)
        weight = torch.randn(512, depth, device="cuda", dtype=DTYPE)
        try:
            gated_linear(x, weight, True, tiles=tiles) if gated else linear(x, weight, tiles=tiles)
            torch.cuda.synchronize()
        except Exception as error:
            print(f"does not compile or run: {tiles} gated {gated}: {str(error)[:300]}", flush=True)
    if share == 0:
        print(f"{len(jobs)} kernels", flush=True)


def tune(models: list[str], budget: float) -> None:
    """The best three cuts of each shape and number of rows, with dependent launches; stops after `budget` seconds."""
    begin = time.monotonic()
    command = [sys.executable, "-m", "benches.gpu.linear", "--compile"]
    for process in [subprocess.Popen([*command, str(share)]) for share in range(COMPILERS)]:
        try:
            process.wait(timeout=max(1.0, budget / 2 + begin - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            print("a compiling process took too long", flush=True)
    print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
    for model in models:
        for name, (outputs, depth) in MODELS[model].items():
            case = Case(name, outputs, depth)
            for rows in ROWS:
                if time.monotonic() - begin > budget:
                    print("out of time", flush=True)
                    return
                tune_row(model, name, case, rows)
            del case
            torch.cuda.empty_cache()


def tune_row(model: str, name: str, case: Case, rows: int) -> None:
    case.draw(rows)
    theirs = case.us(lambda weight: cublas(case.x, weight))
    times: dict[Tiles, float] = {}
    for tiles in cuts_of(rows, case.depth, case.gated):
        try:
            error = case.error(tiles)
            if not error < 1e-2:
                print(f"WRONG by {error:.1e}: {model} {name} {rows} {tiles}", flush=True)
                continue
            times[tiles] = case.us(lambda weight, tiles=tiles: case.ours(weight, tiles))
        except (RuntimeError, ValueError) as error:
            print(f"FAILED: {model} {name} {rows} {tiles}: {str(error)[:200]}", flush=True)
    print(f"{model} {name:8s}{rows:4d} rows  cuBLAS {theirs:6.1f} us {case.bytes / theirs / 1e6:.2f} TB/s", flush=True)
    kinds: dict[type, list[Tiles]] = {}
    for tiles in sorted(times, key=times.__getitem__):
        kinds.setdefault(type(tiles), []).append(tiles)
    for kind, best in kinds.items():
        for tiles in best[: 3 if kind is RingTiles else 2]:
            print(f"      {times[tiles]:6.1f} us {case.bytes / times[tiles] / 1e6:.2f} TB/s  {tiles}", flush=True)


def table(models: list[str], counts: Sequence[int] = ROWS) -> Iterator[Row]:
    """Ours with dependent launches in TB/s of the weights; the others beside it."""
    for model in models:
        for name, (outputs, depth) in MODELS[model].items():
            case = Case(name, outputs, depth)
            for rows in counts:
                yield table_row(f"{model} {name}, {rows} rows", case, rows)
            del case
            torch.cuda.empty_cache()


def table_row(what: str, case: Case, rows: int) -> Row:
    """The demand is 95 % of the bandwidth, up to 64 rows; the limit that or the operations'."""
    case.draw(rows)
    peer = case.us(lambda weight: cublas(case.x, weight))
    launch.set_dependent_launch(False)
    plain = case.us(case.ours)
    launch.set_dependent_launch(True)
    us = case.us(case.ours)
    least = max(case.bytes / BYTES_PER_SECOND, 2 * rows * case.outputs * case.depth / OPERATIONS_PER_SECOND) * 1e6
    rates = {"us": f"{us:.1f}", "not dependent": number(case.bytes / plain / 1e6)}
    return Row(
        what, case.bytes / us / 1e6, "TB/s", 0.95 * BYTES_PER_SECOND / 1e12 if rows <= 64 else None,
        case.bytes / peer / 1e6, "cuBLAS", case.bytes / least / 1e6, {**rates, "error": f"{case.error():.0e}"},
    )  # fmt: skip


def rows() -> Iterator[Row]:
    """Of a Llama-3-8B: the whole chain of products, then each at some numbers of rows."""
    torch.manual_seed(0)
    compile_default((1, 16, 64, 256))
    yield from chain((1, 64, 256))
    yield from table(["llama-3-8b"], (1, 16, 64, 256))


def compile_default(counts: Sequence[int]) -> None:
    """The kernels of a Llama's products, all at once."""
    with launch.compiling_ahead(COMPILERS):
        for name, (outputs, depth) in LLAMA.items():
            weight = torch.empty(outputs, depth, device="cuda", dtype=DTYPE)
            for count in counts:
                x = torch.empty(count, depth, device="cuda", dtype=DTYPE)
                gated_linear(x, weight, True) if name == "gate_up" else linear(x, weight)


def chain(counts: Sequence[int] = ROWS) -> Iterator[Row]:
    """Milliseconds of all products of a Llama-3-8B step in one graph, each with input of its own but for the gated one's output."""
    layers = [
        {
            name: torch.randn(n, k, device="cuda", dtype=DTYPE) * k**-0.5
            for name, (n, k) in LLAMA.items()
            if name != "head"
        }
        for _ in range(LAYERS)
    ]
    head = torch.randn(*LLAMA["head"], device="cuda", dtype=DTYPE) / 64
    size = (sum(w.numel() for layer in layers for w in layer.values()) + head.numel()) * DTYPE.itemsize
    for rows in counts:
        x = torch.randn(rows, 4096, device="cuda", dtype=DTYPE)

        def step(
            product: Callable[[Tensor, Tensor], Tensor], pair: Callable[[Tensor, Tensor], Tensor], x: Tensor = x
        ) -> None:
            for layer in layers:
                product(x, layer["qkv"])
                y = product(x, layer["o"])
                product(pair(y, layer["gate_up"]), layer["down"])
            product(x, head)

        def unfused(x: Tensor, weight: Tensor) -> Tensor:
            return cublas(x, weight)[:, : weight.shape[0] // 2]

        def cublas_gated(x: Tensor, weight: Tensor) -> Tensor:
            return fused.gated(cublas(x, weight), True)

        def ours_gated(x: Tensor, weight: Tensor) -> Tensor:
            return gated_linear(x, weight, True)

        times = {}
        launch.set_dependent_launch(False)
        times["cuBLAS"] = median_ms(lambda: step(cublas, unfused), 15)
        times["cuBLAS + activation"] = median_ms(lambda: step(cublas, cublas_gated), 15)
        times["ours"] = median_ms(lambda: step(linear, ours_gated), 15)
        launch.set_dependent_launch(True)
        times["ours dependent"] = median_ms(lambda: step(linear, ours_gated), 15)
        ours = times.pop("ours dependent")
        least = max(size / BYTES_PER_SECOND, rows * size / OPERATIONS_PER_SECOND) * 1e3
        yield Row(
            f"all products of a Llama-3-8B step, {rows} rows", ours, "ms",
            peer=times["cuBLAS + activation"], peer_name="cuBLAS + activation", limit=least,
            more={f"{name}, ms": f"{ms:.3f}" for name, ms in times.items()},
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tune", action="store_true", help="sweep the cuts")
    parser.add_argument("--model", choices=MODELS, action="append", help="by default all")
    parser.add_argument("--budget", type=float, default=220.0, help="seconds of a sweep")
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    models = arguments.model or list(MODELS)
    torch.manual_seed(int(time.time()))
    if arguments.compile is not None:
        compile_share(arguments.compile)
        return
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    if arguments.tune:
        tune(models, arguments.budget)
    else:
        show(chain())
        show(table(models))


if __name__ == "__main__":
    main()
