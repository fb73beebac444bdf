"""Requests with a common prompt sent at once: the last one's first token, against one prefill and against no prefix cache.

python -m benches.gpu.prefix [--model llama-3-8b] [--requests 64] [--shared 8192]

Each request is the common prompt and a short end of its own, one output token. All prompts are new to the cache in every turn.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from typing import Any

from benches.gpu.models import SHAPES, random_llm
from benches.gpu.rows import Row, show
from benches.gpu.workload import prompts, timed

OWN = 32
TURNS = 3


def together(requests: int, shared: int, own: int, seed: int) -> list[list[int]]:
    """A common beginning, and an end of each."""
    common = prompts(1, shared, seed)[0]
    return [common + end for end in prompts(requests, own, seed + 1_000_000)]


def cached(model: str, requests: int, shared: int, own: int, **settings: Any) -> tuple[float, float]:
    """Seconds of one prompt, and of all requests."""
    with random_llm(model, enable_prefix_caching=True, **settings) as llm:
        timed(llm, together(requests, shared, own, 1), 1)
        one = statistics.median(timed(llm, prompts(1, shared + own, 10 + turn), 1) for turn in range(TURNS))
        last = statistics.median(timed(llm, together(requests, shared, own, 20 + turn), 1) for turn in range(TURNS))
    return one, last


def uncached(model: str, requests: int, shared: int, own: int, **settings: Any) -> float:
    """Seconds of all requests."""
    with random_llm(model, **settings) as llm:
        timed(llm, prompts(1, shared + own, 1), 1)
        return timed(llm, together(requests, shared, own, 2), 1)


def rows(
    model: str = "llama-3-8b", requests: int = 64, shared: int = 8192, own: int = OWN, **settings: Any
) -> Iterator[Row]:
    """With the cache, and once without."""
    one, last = cached(model, requests, shared, own, **settings)
    apart = uncached(model, requests, shared, own, **settings)
    name = f"{model}, {requests} requests, {shared} common tokens"
    yield Row(f"{model}, one prompt of {shared + own} tokens, TTFT", one * 1e3, "ms")
    yield Row(f"{name}: last TTFT", last * 1e3, "ms")
    yield Row("the same without a prefix cache", apart * 1e3, "ms")
    yield Row("last TTFT / one prefill", last / one, "times", 1.3)
    yield Row("without a prefix cache / with it", apart / last, "x", 20.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-8b", choices=sorted(SHAPES))
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--shared", type=int, default=8192)
    args = parser.parse_args()
    show(rows(args.model, args.requests, args.shared))


if __name__ == "__main__":
    main()
