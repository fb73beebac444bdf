"""The whole engine on one GPU with random weights: decode steps, prefill and offline batches, beside what peers need.

python -m benches.gpu.engine [--model llama-3-8b] [--only decode,prefill,offline] [--eager]

Peers' figures are of docs/performance.md: vLLM 0.26.0 and SGLang 0.5.17, measured on an H200. A decode step's time is the
difference of two generations of different lengths, over the difference of their lengths. offline-N is nano-vllm's workload:
random prompts of 100 to 1024 ids, as many outputs, temperature 0.6, at most 256 at once.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Final

from benches.gpu.models import random_llm
from octavo import LLM, SamplingParams

# rows, context: best peer's ms and the limit's.
DECODE: Final[dict[str, dict[tuple[int, int], tuple[float, float]]]] = {
    "llama-3-8b": {(1, 128): (4.68, 3.53), (1, 4096): (4.84, 3.66), (64, 128): (5.81, 3.9), (64, 1024): (7.47, 5.7)},
    "qwen3-0.6b": {(1, 128): (0.0, 0.29), (64, 128): (0.0, 0.0), (256, 512): (0.0, 0.0)},
    "qwen3-30b-a3b": {(1, 128): (0.0, 0.0), (64, 128): (0.0, 0.0)},
}
PREFILL: Final[dict[str, dict[tuple[int, int], tuple[float, float]]]] = {
    "llama-3-8b": {(1, 1024): (28.8, 19.4), (1, 8192): (210.0, 176.0), (8, 2048): (381.8, 317.0)},
    "qwen3-0.6b": {(1, 1024): (0.0, 0.0), (1, 8192): (0.0, 0.0)},
    "qwen3-30b-a3b": {(1, 8192): (0.0, 0.0)},
}
OFFLINE: Final[dict[str, dict[int, tuple[float, float]]]] = {
    "llama-3-8b": {256: (9748, 12300), 1024: (10676, 0)},
    "qwen3-0.6b": {256: (23243, 33000), 1024: (19693, 0)},
    "qwen3-30b-a3b": {256: (0, 0)},
}


def prompts(rows: int, length: int, seed: int) -> list[list[int]]:
    """Random ids, different in every call so that nothing is cached."""
    random.seed(seed)
    return [[random.randint(10, 9999) for _ in range(length)] for _ in range(rows)]


def timed(llm: LLM, ids: list[list[int]], new: int) -> float:
    """Seconds of one generation of `new` tokens for each prompt, greedy."""
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    began = time.perf_counter()
    llm.generate(ids, params, use_tqdm=False)
    return time.perf_counter() - began


def decode_ms(llm: LLM, rows: int, context: int) -> float:
    """Milliseconds of a decode step around `context` known tokens."""
    few, many = 9, 73

    def one(turn: int) -> float:
        short = timed(llm, prompts(rows, context - 32, 2 * turn), few)
        long = timed(llm, prompts(rows, context - 32, 2 * turn + 1), many)
        return (long - short) / (many - few) * 1e3

    return statistics.median(one(turn) for turn in range(5))


def prefill_ms(llm: LLM, rows: int, length: int) -> float:
    """Milliseconds from `rows` prompts of `length` to the first token of all."""
    timed(llm, prompts(rows, length, 99), 1)
    return statistics.median(timed(llm, prompts(rows, length, turn), 1) for turn in range(5)) * 1e3


def offline(llm: LLM, count: int) -> float:
    """Output tokens a second."""
    random.seed(0)
    ids = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(count)]
    params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=random.randint(100, 1024)) for _ in range(count)
    ]
    began = time.perf_counter()
    llm.generate(ids, params, use_tqdm=False)
    return sum(p.max_tokens or 0 for p in params) / (time.perf_counter() - began)


def row(name: str, value: float, unit: str, peer: float, limit: float) -> None:
    """One line of the table."""
    beside = f"best peer {peer:10,.2f}" if peer else ""
    share = ""
    if limit:
        ratio = value / limit if unit == "tok/s" else limit / value
        share = f"limit {limit:10,.2f}  {ratio:6.1%} of it"
    print(f"{name:26s} {value:12,.2f} {unit:6s} {beside:22s} {share}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-8b", choices=sorted(DECODE))
    parser.add_argument("--only", default="decode,prefill,offline")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--offline", default="", help="only these sizes, e.g. 256")
    args = parser.parse_args()
    began = time.perf_counter()
    with random_llm(args.model, enforce_eager=args.eager, max_num_seqs=256) as llm:
        timed(llm, prompts(1, 16, 0), 1)
        row(f"{args.model} first token", time.perf_counter() - began, "s", 60.0, 0.0)
        timed(llm, prompts(8, 300, 7), 20)
        if "decode" in args.only:
            for (rows, context), (peer, limit) in DECODE[args.model].items():
                row(f"decode {rows} x {context}", decode_ms(llm, rows, context), "ms", peer, limit)
        if "prefill" in args.only:
            for (rows, length), (peer, limit) in PREFILL[args.model].items():
                row(f"prefill {rows} x {length}", prefill_ms(llm, rows, length), "ms", peer, limit)
        if "offline" in args.only:
            for count, (peer, limit) in OFFLINE[args.model].items():
                if not args.offline or str(count) in args.offline.split(","):
                    row(f"offline-{count}", offline(llm, count), "tok/s", peer, limit)


if __name__ == "__main__":
    main()
