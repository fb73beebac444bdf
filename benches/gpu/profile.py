"""Where the time of a step goes: kernels of one generation, summed by name, and how busy the GPU is.

python -m benches.gpu.profile [--model llama-3-8b] [--work 1x128+64] [--work 64x128+64] [--work 1x8192+1] [--work offline256]

`RxC+N`: R prompts of C tokens, N new tokens each, greedy.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from benches.gpu.models import SHAPES, random_llm
from benches.gpu.workload import offline, prompts, timed
from octavo import LLM


@dataclass(frozen=True, slots=True)
class Span:
    """Of a kernel or a copy on the device, in microseconds."""

    start: float
    end: float
    name: str


def device_spans(run: Callable[[], object]) -> list[Span]:
    """What ran on the device meanwhile, in order of its begin."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    spans = [
        Span(event.time_range.start, event.time_range.end, event.name)
        for event in found.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return sorted(spans, key=lambda span: span.start)


def busy_us(spans: list[Span]) -> float:
    """Time in which anything ran."""
    busy, last = 0.0, float("-inf")
    for span in spans:
        busy += max(0.0, span.end - max(span.start, last))
        last = max(last, span.end)
    return busy


def short_offline(llm: LLM, count: int) -> None:
    """The offline workload with a tenth of its outputs."""
    work = offline(count)
    for params in work.params:
        params.max_tokens = (params.max_tokens or 0) // 10
    llm.generate(work.ids, work.params, use_tqdm=False)


def parsed(text: str) -> Callable[[LLM, int], object]:
    """What a `--work` argument asks for."""
    if text.startswith("offline"):
        return lambda llm, seed: short_offline(llm, int(text.removeprefix("offline")))
    shape, new = text.split("+")
    rows, context = shape.split("x")
    return lambda llm, seed: timed(llm, prompts(int(rows), int(context), seed), int(new))


def report(name: str, run: Callable[[LLM, int], object], llm: LLM, lines: int) -> None:
    """One table."""
    run(llm, 1)
    began = time.perf_counter()
    run(llm, 2)
    plain = time.perf_counter() - began
    spans = device_spans(lambda: run(llm, 3))
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for each in spans:
        totals[each.name][0] += each.end - each.start
        totals[each.name][1] += 1
    busy, span = busy_us(spans), max(each.end for each in spans) - spans[0].start
    print(
        f"== {name}: {plain * 1e3:.1f} ms unprofiled; device busy {busy / 1e3:.1f} of {span / 1e3:.1f} ms = {busy / span:.1%}"
    )
    for kernel, (us, count) in sorted(totals.items(), key=lambda item: -item[1][0])[:lines]:
        print(f"{us / 1e3:9.2f} ms {us / busy:6.1%} {count:7d} x {us / count:8.1f} us  {kernel[:70]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-8b", choices=sorted(SHAPES))
    parser.add_argument("--work", action="append", default=[])
    parser.add_argument("--lines", type=int, default=14)
    args = parser.parse_args()
    with random_llm(args.model, disable_log_stats=True) as llm:
        for text in args.work or ["1x128+64", "64x128+64", "1x8192+1"]:
            report(f"{args.model} {text}", parsed(text), llm, args.lines)


if __name__ == "__main__":
    main()
