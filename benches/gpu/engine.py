"""The whole engine on one GPU with random weights: decode steps, prefill and offline batches, beside what peers need.

python -m benches.gpu.engine [--model llama-3-8b] [--only decode,prefill,offline] [--eager]

Peers' figures are of docs/performance.md: vLLM 0.26.0 and SGLang 0.5.17, measured on an H200. A decode step's time is the
difference of two generations of different lengths, over the difference of their lengths. offline-N is nano-vllm's workload:
random prompts of 100 to 1024 ids, as many outputs, temperature 0.6, at most 256 at once.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Collection, Iterator
from typing import Any, Final

from benches.gpu import limits
from benches.gpu.models import SHAPES, random_llm
from benches.gpu.rows import Row, show
from benches.gpu.workload import decode_ms, offline, output_rate, prompts, timed
from octavo import LLM

PARTS: Final = ("decode", "prefill", "offline")
# Rows and context: milliseconds demanded, and the best peer's.
Points = dict[tuple[int, int], tuple[float | None, float | None]]
DECODE: Final[dict[str, Points]] = {
    "llama-3-8b": {(1, 128): (3.95, 4.68), (1, 4096): (None, 4.84), (64, 128): (4.9, 5.81), (64, 1024): (6.8, 7.47)},
    "qwen3-0.6b": {(1, 128): (None, None), (64, 128): (None, None), (256, 512): (None, None)},
    "qwen3-30b-a3b": {(1, 128): (limits.decode_ms(SHAPES["qwen3-30b-a3b"], 1, 128) / 0.65, None),
                      (64, 128): (limits.decode_ms(SHAPES["qwen3-30b-a3b"], 64, 128) / 0.65, None)},
    "tiny": {(1, 64): (None, None), (4, 64): (None, None)},
}  # fmt: skip
PREFILL: Final[dict[str, Points]] = {
    "llama-3-8b": {(1, 1024): (24.5, 28.8), (1, 8192): (204.0, 210.0), (8, 2048): (368.0, 381.8)},
    "qwen3-0.6b": {(1, 1024): (None, None), (1, 8192): (None, None)},
    "qwen3-30b-a3b": {(1, 8192): (None, None)},
    "tiny": {(1, 64): (None, None)},
}
# Requests: output tokens a second demanded, the best peer's, and the limit's as docs/performance.md has it.
OFFLINE: Final[dict[str, dict[int, tuple[float | None, float | None, float | None]]]] = {
    "llama-3-8b": {256: (10_800, 9_748, 12_300), 1024: (12_300, 10_676, None)},
    "qwen3-0.6b": {256: (28_000, 23_243, 33_000), 1024: (28_000, 19_693, None)},
    "qwen3-30b-a3b": {256: (None, None, None)},
    "tiny": {4: (None, None, None)},
}


def prefill_ms(llm: LLM, rows: int, length: int) -> float:
    """Milliseconds from `rows` prompts of `length` to the first token of all."""
    timed(llm, prompts(rows, length, 99), 1)
    return statistics.median(timed(llm, prompts(rows, length, turn), 1) for turn in range(5)) * 1e3


def rows(
    model: str, only: Collection[str] = PARTS, sizes: Collection[int] | None = None, **settings: Any
) -> Iterator[Row]:
    """The points of a model; `sizes`: offline batches of only these numbers of requests."""
    shape = SHAPES[model]
    with random_llm(model, **{"max_num_seqs": 256, **settings}) as llm:
        timed(llm, prompts(8, 40, 7), 20)
        if "decode" in only:
            for (count, context), (wanted, peer) in DECODE[model].items():
                yield Row(
                    f"{model} decode step, batch {count}, context {context}", decode_ms(llm, count, context), "ms",
                    wanted, peer, limit=limits.decode_ms(shape, count, context),
                )  # fmt: skip
        if "prefill" in only:
            for (count, length), (wanted, peer) in PREFILL[model].items():
                yield Row(
                    f"{model} prefill {count} x {length}", prefill_ms(llm, count, length), "ms",
                    wanted, peer, limit=limits.prefill_ms(shape, count, length),
                )  # fmt: skip
        if "offline" in only:
            longest = 40 if model == "tiny" else 1024
            for count, (wanted, peer, limit) in OFFLINE[model].items():
                if sizes is None or count in sizes:
                    work = offline(count, min(100, longest // 4), longest)
                    began = time.perf_counter()
                    rate = output_rate(llm, work)
                    more = {"seconds": f"{time.perf_counter() - began:.1f}"}
                    yield Row(f"{model} offline-{count}", rate, "tok/s", wanted, peer, limit=limit, more=more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-8b", choices=sorted(DECODE))
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--offline", default="", help="only these sizes, e.g. 256")
    args = parser.parse_args()
    sizes = [int(size) for size in args.offline.split(",")] if args.offline else None
    show(rows(args.model, args.only.split(","), sizes, enforce_eager=args.eager))


if __name__ == "__main__":
    main()
