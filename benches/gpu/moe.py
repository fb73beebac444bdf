"""Mixtures of experts on one GPU against their limit.

Every figure is a replay of a CUDA graph that goes through several layers' weights, more than the L2 cache holds, router included.
The limit is the larger of two times: the weights of the experts that were chosen at 4.25 TB/s, the operations at 750 TFLOP/s. The
first layer's result is compared with fp64 on fresh random operands.

    python -m benches.gpu.moe            # the default cuts
    python -m benches.gpu.moe --tune     # the cuts of each product, best first
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from benches.gpu.limits import BYTES_PER_SECOND, OPERATIONS_PER_SECOND
from benches.gpu.linear import median_ms
from benches.gpu.rows import Row, number, show
from octavo.kernels import expert_gemm, expert_gemv, launch, moe, routing
from octavo.kernels.expert_tiles import ExpertGemmTiles, ExpertGemvTiles, GemvMixture, fastest

TOKENS: Final = (1, 8, 64, 256, 2048, 8192)
DTYPE: Final = torch.bfloat16
COMPILERS: Final = 14


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a layer."""

    hidden: int
    size: int
    experts: int
    top: int
    layers: int


SHAPES: Final = {
    "qwen3-30b-a3b": Shape(hidden=2048, size=768, experts=128, top=8, layers=4),
    "mixtral-8x7b": Shape(hidden=4096, size=14336, experts=8, top=2, layers=2),
}


class Case:
    """Several layers, and inputs of some numbers of tokens."""

    def __init__(self, shape: Shape):
        self.shape = shape
        h, f, e = shape.hidden, shape.size, shape.experts
        self.layers = [
            (self._draw(e, h, fan=h), self._draw(e, 2 * f, h, fan=h), self._draw(e, h, f, fan=f))
            for _ in range(shape.layers)
        ]
        self.x = {tokens: torch.randn(tokens, h, device="cuda", dtype=DTYPE) for tokens in TOKENS}

    @staticmethod
    def _draw(*size: int, fan: int) -> Tensor:
        return torch.empty(*size, device="cuda", dtype=DTYPE).normal_(0.0, fan**-0.5)

    def mix(self, tokens: int, layer: int) -> Tensor:
        """One layer's mixture."""
        router, gate_up, down = self.layers[layer]
        x = self.x[tokens]
        logits = moe.router_logits(x, router)
        return moe.mixture(x, logits, gate_up, down, num_per_token=self.shape.top, normalize=True, silu=True)

    def us(self, run: Callable[[int], object]) -> float:
        """Of one layer's `run`."""
        return median_ms(lambda: [run(layer) for layer in range(self.shape.layers)]) * 1e3 / self.shape.layers

    def active(self, tokens: int) -> float:
        """Experts of a layer that were chosen, on average."""
        found = 0
        for router, _, _ in self.layers:
            ids = routing.route(moe.router_logits(self.x[tokens], router), self.shape.top, True).ids
            found += len(ids.unique())
        return found / len(self.layers)

    def error(self, tokens: int) -> float:
        """Of the first layer, relative, in the norm; routed by the logits of our product, which is compared too."""
        router, gate_up, down = self.layers[0]
        x = self.x[tokens].double()
        logits = moe.router_logits(self.x[tokens], router)
        exact = x @ router.double().T
        router_error = float((logits.double() - exact).norm() / exact.norm())
        if not router_error < 1e-4:
            return router_error
        order = logits.double().sort(dim=1, descending=True, stable=True)
        ids = order.indices[:, : self.shape.top]
        weights = order.values[:, : self.shape.top].softmax(1)
        reference = torch.zeros_like(x)
        for expert in ids.unique().tolist():
            token, slot = (ids == expert).nonzero(as_tuple=True)
            gate, up = (x[token] @ gate_up[expert].double().T).chunk(2, dim=1)
            inner = torch.nn.functional.silu(gate) * up
            reference[token] += weights[token, slot, None] * (inner @ down[expert].double().T)
        # Memory that the results may get holds NaN.
        torch.full((tokens * self.shape.top, 2 * self.shape.hidden), torch.nan, device="cuda", dtype=DTYPE)
        result = self.mix(tokens, 0)
        again = self.mix(tokens, 0)
        if not torch.equal(result, again):
            return float("inf")
        return float((result.double() - reference).norm() / reference.norm())


def table(name: str, case: Case) -> Iterator[Row]:
    """Microseconds of a layer for each number of tokens."""
    shape = case.shape
    weights = 3 * shape.size * shape.hidden
    with launch.compiling_ahead(COMPILERS):
        for tokens in TOKENS:
            case.mix(tokens, 0)
    for tokens in TOKENS:
        case.mix(tokens, 0)
        error, active = case.error(tokens), case.active(tokens)
        us = case.us(lambda layer, tokens=tokens: case.mix(tokens, layer))
        traffic = active * weights * DTYPE.itemsize / BYTES_PER_SECOND * 1e6
        work = 2 * tokens * shape.top * weights / OPERATIONS_PER_SECOND * 1e6
        bound = "bytes" if traffic >= work else "operations"
        limit = max(traffic, work)
        more = {"bound by": bound, "experts": f"{active:.1f}"}
        more |= {"TFLOP/s": number(2 * tokens * shape.top * weights / us / 1e6)}
        yield Row(
            f"mixture of {name}, {tokens} tokens", us, "us", limit=limit,
            more={**more, "error": f"{error:.0e}" + ("" if error < 1e-2 else " WRONG")},
        )  # fmt: skip


def rows() -> Iterator[Row]:
    """Of all shapes."""
    torch.manual_seed(0)
    for name, shape in SHAPES.items():
        yield from table(name, Case(shape))
        torch.cuda.empty_cache()


def gemv_cuts(shape: Shape, gated: bool) -> Iterator[ExpertGemvTiles]:
    """Those worth a try for one token."""
    mixture = fastest(1, shape.top, shape.experts, shape.hidden, shape.size, exact=False)
    assert isinstance(mixture, GemvMixture)
    first = mixture.gate_up if gated else mixture.down
    yield first
    yield ExpertGemvTiles(first.outputs * 2, first.depth, 8)
    yield ExpertGemvTiles(max(1, first.outputs // 2), first.depth, 4)
    yield ExpertGemvTiles(first.outputs * 2, first.depth // 2, 4)


# Rows; then outputs, depth, stages, warps, group, whether the weights are left.
GEMM_CUTS: Final[dict[int, list[tuple[int, list[tuple[Any, ...]], list[tuple[Any, ...]]]]]] = {
    64: [
        (16, [(64, 128, 3, 4, 1, True), (64, 64, 4, 4, 1, True), (32, 128, 3, 4, 1, False), (64, 128, 3, 4, 1, False)],
             [(64, 128, 3, 4, 1, True), (64, 64, 4, 4, 1, True), (128, 64, 4, 4, 1, True), (64, 128, 3, 4, 1, False)]),
    ],
    256: [
        (32, [(64, 128, 2, 4, 1, True), (64, 64, 4, 4, 1, True)], [(64, 128, 3, 4, 1, True), (128, 64, 4, 4, 1, True)]),
        (64, [(64, 64, 4, 4, 4, False)], [(128, 64, 4, 4, 4, False)]),
    ],
    8192: [
        (128, [(128, 64, 3, 8, 8, False), (64, 64, 4, 8, 8, False), (64, 64, 4, 4, 8, False)],
              [(128, 64, 4, 8, 8, False), (128, 64, 3, 4, 8, False), (128, 64, 3, 8, 8, False)]),
        (64, [(128, 64, 4, 8, 8, False)], [(256, 64, 4, 8, 8, False)]),
    ],
}  # fmt: skip


def products(case: Case, tokens: int) -> Iterator[tuple[str, Callable[[int], object]]]:
    """Each cut of each product, named, as a function of the layer."""
    shape, x = case.shape, case.x[tokens]
    logits = moe.router_logits(x, case.layers[0][0])
    routed = routing.route(logits, shape.top, True)
    if tokens == 1:
        inner = torch.randn(shape.top, shape.size, device="cuda", dtype=DTYPE)
        for cut in gemv_cuts(shape, True):
            yield f"gate_up {cut}", lambda i, c=cut: expert_gemv.gate_up(x, case.layers[i][1], routed.ids, True, c)
        for cut in gemv_cuts(shape, False):
            yield (
                f"down    {cut}",
                lambda i, c=cut: expert_gemv.down(inner, case.layers[i][2], routed.ids, routed.weights, c),
            )
        return
    inner = torch.randn(tokens * shape.top, shape.size, device="cuda", dtype=DTYPE)
    for rows, gated, plain in GEMM_CUTS[tokens]:
        order = routing.by_expert(routed.ids, shape.experts, rows)
        for numbers in gated:
            tiles = ExpertGemmTiles(*numbers)
            yield (
                f"gate_up rows={rows} {tiles}",
                lambda i, c=tiles, o=order: expert_gemm.gate_up(x, case.layers[i][1], o, shape.top, True, c),
            )
        for numbers in plain:
            tiles = ExpertGemmTiles(*numbers)
            yield (
                f"down    rows={rows} {tiles}",
                lambda i, c=tiles, o=order: expert_gemm.down(inner, case.layers[i][2], o, routed.weights, c),
            )


def tune(name: str, case: Case, budget: float) -> None:
    """The cuts of each product, fastest first; stops after `budget` seconds."""
    began = time.monotonic()
    # Routes and orders are made by kernels that must have run before the cuts' ones are compiled and not run.
    kept = {tokens: list(products(case, tokens)) for tokens in (1, *GEMM_CUTS)}
    with launch.compiling_ahead(COMPILERS):
        for tokens in (1, *GEMM_CUTS):
            for _, run in kept[tokens]:
                run(0)
    print(f"{name}: compiled in {time.monotonic() - began:.0f} s", flush=True)
    for tokens in (1, *GEMM_CUTS):
        times: dict[str, float] = {}
        for cut, run in kept[tokens]:
            if time.monotonic() - began > budget:
                print("out of time", flush=True)
                break
            try:
                times[cut] = case.us(run)
            except (RuntimeError, ValueError) as error:
                print(f"FAILED: {tokens} tokens {cut}: {str(error)[:200]}", flush=True)
        for cut in sorted(times, key=lambda cut: (cut[:4], times[cut])):
            print(f"{name} {tokens:5d} tokens {times[cut]:9.1f} us  {cut}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="sweep the cuts")
    parser.add_argument("--model", choices=SHAPES, action="append", help="by default all")
    parser.add_argument("--budget", type=float, default=80.0, help="seconds of a sweep")
    arguments = parser.parse_args()
    torch.manual_seed(int(time.time()))
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    for name in arguments.model or SHAPES:
        case = Case(SHAPES[name])
        if arguments.tune:
            tune(name, case, arguments.budget)
        else:
            show(table(name, case))
        del case
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
