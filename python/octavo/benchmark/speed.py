"""Speed of one engine on fixed work: single-stream decode, prefill, many requests at once.

Everything goes through the public API, so what is measured is what a user gets.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass

from octavo.analysis.bandwidth import read_bandwidth, remember
from octavo.llm import LLM
from octavo.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Latency:
    """One request alone; medians of the repeats."""

    prompt_tokens: int
    output_tokens: int
    ttft_ms: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    fraction_of_limit: float | None
    """Bytes of the weights as stored plus the KV cache read for a token, over the read bandwidth, over the measured time."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """Many requests sent at once."""

    num_requests: int
    seconds: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    prefix_hit_rate: float
    kv_waste_fraction: float


def random_prompt(length: int, vocab_size: int, seed: int) -> list[int]:
    """Token ids that share no prefix with another seed's."""
    numbers = random.Random(seed)
    return [numbers.randrange(vocab_size) for _ in range(length)]


def latency(llm: LLM, prompt_tokens: int, output_tokens: int, repeats: int = 5) -> Latency:
    """Measures one request at a time; every repeat has a prompt of its own, so none is a prefix hit."""
    vocab = llm.engine.vocab_size
    params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False)
    first_times, decode_times = [], []
    for repeat in range(repeats + 1):
        prompt = random_prompt(prompt_tokens, vocab, seed=repeat)
        start = time.perf_counter()
        first, seen = 0.0, 0
        for output in llm.stream(prompt, params):
            if not seen:  # a late reader gets more than one token at once
                first, seen = time.perf_counter(), len(output.outputs[0].token_ids)
        end = time.perf_counter()
        if repeat:  # the first warms up
            first_times.append(first - start)
            decode_times.append((end - first) / max(1, output_tokens - seen))
    ttft, step = statistics.median(first_times), statistics.median(decode_times)
    return Latency(
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        ttft_ms=ttft * 1e3,
        prefill_tokens_per_s=prompt_tokens / ttft,
        decode_tokens_per_s=1.0 / step if output_tokens > 1 else 0.0,
        fraction_of_limit=_fraction(llm, prompt_tokens + output_tokens // 2, step) if output_tokens > 1 else None,
    )


def throughput(llm: LLM, prompts: list[list[int]], output_tokens: int) -> Throughput:
    """Sends all prompts at once and waits for the last."""
    params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False)
    before = llm.stats()
    waste = WasteMeter()
    start = time.perf_counter()
    with llm.engine.submit([llm.engine.submission_of_ids(p, params, stream=True) for p in prompts]) as batch:
        for _ in batch.updates():
            waste.sample(llm.stats())
    seconds = time.perf_counter() - start
    after = llm.stats()
    queried = after["query_tokens"] - before["query_tokens"]
    outputs = len(prompts) * output_tokens
    return Throughput(
        num_requests=len(prompts),
        seconds=seconds,
        output_tokens_per_s=outputs / seconds,
        total_tokens_per_s=(outputs + sum(map(len, prompts))) / seconds,
        prefix_hit_rate=(after["hit_tokens"] - before["hit_tokens"]) / max(1.0, queried),
        kv_waste_fraction=waste.fraction,
    )


class WasteMeter:
    """Average over samples of the share of allocated KV-cache tokens that hold nothing."""

    def __init__(self) -> None:
        self._allocated = 0.0
        self._filled = 0.0

    def sample(self, stats: dict[str, float]) -> None:
        """Notes one moment."""
        self._allocated += stats["allocated_tokens"]
        self._filled += stats["filled_tokens"]

    @property
    def fraction(self) -> float:
        """(allocated − filled) / allocated."""
        return 1.0 - self._filled / self._allocated if self._allocated else 0.0


def _fraction(llm: LLM, context: int, seconds: float) -> float | None:
    """Share of the memory limit of a decode step, on a CPU."""
    if llm.engine.device_type != "cpu":
        return None
    needed = llm.engine.stored_bytes + context * llm.engine.kv_bytes_per_token
    bandwidth = read_bandwidth()
    remember(bandwidth)
    return needed / bandwidth / seconds
