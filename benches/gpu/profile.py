"""Where the time of a step goes: kernels of one generation, summed by name, and how busy the GPU is.

python -m benches.gpu.profile [--model llama-3-8b] [--work 1x128+64] [--work 64x128+64] [--work 1x8192+1] [--work offline256]

`RxC+N`: R prompts of C tokens, N new tokens each, greedy.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from benches.gpu.engine import prompts, timed
from benches.gpu.models import SHAPES, random_llm
from octavo import LLM, SamplingParams


def offline(llm: LLM, count: int) -> None:
    """A short form of the offline workload."""
    random.seed(0)
    ids = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(count)]
    params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=random.randint(20, 100)) for _ in range(count)
    ]
    llm.generate(ids, params, use_tqdm=False)


def work(text: str) -> Callable[[LLM, int], object]:
    """What a `--work` argument asks for."""
    if text.startswith("offline"):
        return lambda llm, seed: offline(llm, int(text.removeprefix("offline")))
    shape, new = text.split("+")
    rows, context = shape.split("x")
    return lambda llm, seed: timed(llm, prompts(int(rows), int(context), seed), int(new))


def report(name: str, run: Callable[[LLM, int], object], llm: LLM, lines: int) -> None:
    """One table."""
    run(llm, 1)
    began = time.perf_counter()
    run(llm, 2)
    plain = time.perf_counter() - began
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run(llm, 3)
        torch.cuda.synchronize()
    spans: list[tuple[float, float]] = []
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spans.append((event.time_range.start, event.time_range.end))
            totals[event.name][0] += event.time_range.elapsed_us()
            totals[event.name][1] += 1
    spans.sort()
    busy, last = 0.0, float("-inf")
    for start, end in spans:
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
    span = spans[-1][1] - spans[0][0]
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
            report(f"{args.model} {text}", work(text), llm, args.lines)


if __name__ == "__main__":
    main()
