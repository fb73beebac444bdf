"""One decode step's graph by itself, without scheduler, inputs and sampling: the model's share of a step, and what its parts cost.

A part's cost is the time that a step without it takes less; kernels that begin before the one in front has ended make the sum of
the kernels' own times meaningless.

    python -m benches.gpu.step [--model llama-3-8b] [--work 1x128] [--work 64x1024] [--profile]
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from triton.testing import do_bench

from benches.gpu.models import SHAPES, random_llm
from octavo import LLM
from octavo.models.spec import MoeSpec
from octavo.ops.base import AttentionMetadata, Batch
from octavo.ops.cuda import CudaOps

BLOCK = 16
PARTS: dict[str, Callable[..., Any]] = {
    "attention": lambda _ops, q, *_args, **_kwargs: q.view(len(q), -1),
    "rotate_and_store": lambda _ops, qkv, _p, _r, kv_cache, _s, **_kwargs: qkv[
        :, : qkv.shape[1] - 2 * kv_cache.shape[2] * kv_cache.shape[4]
    ].unflatten(1, (-1, kv_cache.shape[4])),
    "rms_norm": lambda _ops, x, *_args: x,
    "add_rms_norm": lambda _ops, residual, x, *_args: (x, residual),
    "gated_linear": lambda _ops, x, weight, *_args: x.new_empty(len(x), weight.weight.shape[0] // 2),
    "linear": lambda _ops, x, weight: x.new_empty(len(x), weight.weight.shape[0]),
    "moe": lambda _ops, x, *_args, **_kwargs: x,
    "logits": lambda _ops, *_args, out=None, **_kwargs: out,
}
"""Operations, and what stands for each in a step without it."""


class Step:
    """A step of `rows` rows with `context` tokens each, in scattered blocks."""

    def __init__(self, llm: LLM, rows: int, context: int) -> None:
        started = llm.engine._started
        self.decoder, self.kv_cache = started.runner.decoder, started.runner.kv_cache
        ints: dict[str, Any] = {"device": "cuda", "dtype": torch.int32}
        columns = -(-context // BLOCK)
        blocks = (torch.randperm(rows * columns, **ints) + 1).view(rows, columns)
        table = torch.zeros(rows, -(-llm.engine.max_model_len // BLOCK), **ints)
        table[:, :columns] = blocks
        last = context - 1
        attention = AttentionMetadata(
            slot_mapping=(blocks[:, -1] * BLOCK + last % BLOCK)[None],
            query_start_loc=torch.arange(rows + 1, **ints),
            seq_lens=torch.full((rows,), context, **ints),
            block_table=table[None],
            group_windows=(None,),
            block_size=BLOCK,
            max_query_len=1,
            max_seq_len=llm.engine.max_model_len,
            num_decode_rows=rows,
            max_decode_query_len=1,
        )
        ids = torch.randint(1000, (rows,), device="cuda")
        self.batch = Batch(ids, torch.full_like(ids, last), None, attention)
        self.logits = torch.empty(rows, self.decoder.spec.vocab_size, device="cuda", dtype=self.decoder.ops.dtype)

    def run(self) -> Tensor:
        hidden = self.decoder.forward_hidden(self.batch, self.kv_cache)
        return self.decoder.logits(hidden, self.logits)

    @torch.inference_mode()
    def graph(self) -> torch.cuda.CUDAGraph:
        self.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        return graph

    def ms(self) -> float:
        """Median of replays."""
        return float(do_bench(self.graph().replay, warmup=20, rep=150, return_mode="median"))


@contextmanager
def without(part: str) -> Iterator[None]:
    """An op set that leaves the part out."""
    with patch.object(CudaOps, part, PARTS[part]):
        yield


def profiled(step: Step) -> None:
    """Kernels by name, of ten replays."""
    graph = step.graph()
    graph.replay()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(10):
            graph.replay()
        torch.cuda.synchronize()
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            totals[event.name][0] += event.time_range.elapsed_us() / 10
            totals[event.name][1] += 1
    for name, (us, count) in sorted(totals.items(), key=lambda item: -item[1][0])[:14]:
        print(f"  {us:9.1f} us {int(count) // 10:5d} x {us * 10 / count:7.1f} us  {name[:90]}", flush=True)


def report(llm: LLM, rows: int, context: int, *, profile_kernels: bool) -> None:
    step = Step(llm, rows, context)
    whole = step.ms()
    has_experts = any(isinstance(layer.mlp, MoeSpec) for layer in step.decoder.spec.layers)
    parts = [part for part in PARTS if part != "moe" or has_experts]
    costs = {}
    for part in parts:
        with without(part):
            costs[part] = whole - step.ms()
    shown = "  ".join(f"{part} {ms:.3f}" for part, ms in costs.items())
    print(f"step {rows} x {context}: {whole:.3f} ms; costs: {shown}", flush=True)
    if profile_kernels:
        profiled(step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-8b", choices=sorted(SHAPES))
    parser.add_argument("--work", action="append", help="rows x context; several times")
    parser.add_argument("--profile", action="store_true", help="and the kernels' own times")
    args = parser.parse_args()
    with random_llm(args.model, enforce_eager=True) as llm:
        for text in args.work or ["1x128", "64x128", "64x1024"]:
            rows, context = map(int, text.split("x"))
            report(llm, rows, context, profile_kernels=args.profile)


if __name__ == "__main__":
    main()
