"""What the engine benchmarks give an engine to do: random prompts, nano-vllm's offline workload, and a clock on first tokens."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass

from octavo import LLM, SamplingParams
from octavo.inputs import parse_prompts


def prompts(rows: int, length: int, seed: int, vocab_size: int = 10_000) -> list[list[int]]:
    """Random ids, different for every seed so that nothing is cached."""
    drawn = random.Random(seed)
    return [[drawn.randrange(10, vocab_size) for _ in range(length)] for _ in range(rows)]


def greedy(new: int) -> SamplingParams:
    """`new` tokens whatever the model says."""
    return SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)


def timed(llm: LLM, ids: list[list[int]], new: int) -> float:
    """Seconds of one generation of `new` tokens for each prompt, greedy."""
    began = time.perf_counter()
    llm.generate(ids, greedy(new), use_tqdm=False)
    return time.perf_counter() - began


def decode_ms(llm: LLM, rows: int, context: int, turns: int = 5) -> float:
    """Milliseconds of a decode step around `context` known tokens: two generations' difference over that of their lengths."""
    few, many = 9, 73

    def one(turn: int) -> float:
        short = timed(llm, prompts(rows, context - 32, 2 * turn), few)
        long = timed(llm, prompts(rows, context - 32, 2 * turn + 1), many)
        return (long - short) / (many - few) * 1e3

    return statistics.median(one(turn) for turn in range(turns))


@dataclass(frozen=True, slots=True)
class Offline:
    """Requests of nano-vllm's and mini-sglang's published benchmark."""

    ids: list[list[int]]
    params: list[SamplingParams]

    @property
    def outputs(self) -> int:
        """Tokens of all."""
        return sum(p.max_tokens or 0 for p in self.params)

    def part(self, first: int, last: int) -> Offline:
        """Some of them."""
        return Offline(self.ids[first:last], self.params[first:last])


def offline(count: int, shortest: int = 100, longest: int = 1024, vocab_size: int = 10_001) -> Offline:
    """`count` prompts of `shortest` to `longest` random ids, then as many outputs each, at temperature 0.6."""
    drawn = random.Random(0)
    ids = [[drawn.randrange(vocab_size) for _ in range(drawn.randint(shortest, longest))] for _ in range(count)]
    params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=drawn.randint(shortest, longest))
        for _ in range(count)
    ]
    return Offline(ids, params)


def output_rate(llm: LLM, work: Offline) -> float:
    """Output tokens a second."""
    began = time.perf_counter()
    llm.generate(work.ids, work.params, use_tqdm=False)
    return work.outputs / (time.perf_counter() - began)


@dataclass(frozen=True, slots=True)
class Served:
    """How a run went, in seconds from its begin."""

    first: list[float]
    """When each request's first token was there."""
    last: float
    """When all had ended."""
    tokens: int
    """Outputs of all."""


def serve(llm: LLM, work: Offline, batch: int | None = None, poll: float = 0.02) -> Served:
    """Runs the requests: all at once, or in batches of which each begins when the one before has ended whole.

    Args:
        llm: the engine.
        work: the requests, all of which are there at the begin.
        batch: requests of a batch; None: all at once.
        poll: how long the reader sleeps between two looks at what has come, so that it does not disturb the engine; the error of
            `first`.
    """
    engine, size = llm.engine, batch or len(work.ids)
    submissions = [
        engine.submission(prompt, params, stream=True)
        for prompt, params in zip(parse_prompts(work.ids), work.params, strict=True)
    ]
    first: dict[str, float] = {}
    tokens = 0
    began = time.perf_counter()
    for start in range(0, len(submissions), size):
        with engine.submit(submissions[start : start + size]) as running:
            while running.unfinished:
                for update in running.mailbox.receive(0.2):
                    output = running.assemblers[update.request_id].merge(update)
                    if output.outputs[0].token_ids:
                        first.setdefault(output.request_id, time.perf_counter() - began)
                    if output.finished:
                        running.unfinished.discard(update.request_id)
                        tokens += len(output.outputs[0].token_ids)
                if running.unfinished:
                    time.sleep(poll)
    return Served(list(first.values()), time.perf_counter() - began, tokens)
