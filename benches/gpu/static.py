"""Static against continuous batching on nano-vllm's offline workload, output tokens a second and time to first token.

python -m benches.gpu.static [--model llama-3-8b] [--requests 256]

Static: the requests are cut into batches, and a batch begins when the slowest of the one before has ended. All requests are there
at the begin, so a request's time to its first token includes its wait. Two comparisons, both on the same engine code:

- as many rows at once: what refilling a place as soon as it is free brings;
- as many rows as the same memory holds: static batching as it was before paged caches keeps room for the longest sequence,
  contexts of `max_model_len`, for each row; paged blocks hold what is there.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from benches.gpu.models import SHAPES, random_llm
from benches.gpu.rows import Row, number, show
from benches.gpu.workload import Offline, Served, offline, prompts, serve, timed
from octavo import LLM

BATCH = 64
DEMANDED_RATIO = 2.0


def _columns(served: Served) -> dict[str, str]:
    return {
        "mean TTFT, s": number(sum(served.first) / len(served.first)),
        "last TTFT, s": number(max(served.first)),
        "whole, s": number(served.last),
    }


def _rate(served: Served) -> float:
    return served.tokens / served.last


def contiguous_rows(llm: LLM) -> int:
    """Sequences of `max_model_len` that the engine's cache has room for."""
    return int(llm.stats()["num_blocks"]) * llm.engine.config.block_size // llm.engine.max_model_len


def served(model: str, work: Offline, at_once: int, batch: int | None, **settings: Any) -> tuple[Served, Served, int]:
    """By one engine, static in batches (None: of as many as reserved contexts fit) and continuous; and the size of the batches."""
    with random_llm(model, max_num_seqs=at_once, **settings) as llm:
        timed(llm, prompts(8, 40, 7), 20)
        size = batch or min(len(work.ids), contiguous_rows(llm))
        return serve(llm, work, size), serve(llm, work), size


def rows(model: str = "llama-3-8b", requests: int = 256, batch: int = BATCH, **settings: Any) -> Iterator[Row]:
    """Same rows at once; then same memory."""
    work: Offline = offline(requests, *((100, 1024) if model != "tiny" else (4, 24)))
    name = f"{model} offline-{requests}"
    static, continuous, _ = served(model, work, batch, batch, **settings)
    yield Row(f"{name}, static, batches of {batch}", _rate(static), "tok/s", more=_columns(static))
    yield Row(f"{name}, continuous, {batch} at once", _rate(continuous), "tok/s", more=_columns(continuous))
    yield Row("continuous / static, same rows at once", _rate(continuous) / _rate(static), "x")
    at_once = min(256, requests)
    reserved, paged, fitting = served(model, work, at_once, None, **settings)
    yield Row(f"{name}, static, contexts reserved: {fitting} fit", _rate(reserved), "tok/s", more=_columns(reserved))
    yield Row(f"{name}, continuous, paged, {at_once} at once", _rate(paged), "tok/s", more=_columns(paged))
    yield Row("continuous and paged / static and reserved", _rate(paged) / _rate(reserved), "x", DEMANDED_RATIO)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-8b", choices=sorted(SHAPES))
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--batch", type=int, default=BATCH)
    args = parser.parse_args()
    show(rows(args.model, args.requests, args.batch))


if __name__ == "__main__":
    main()
