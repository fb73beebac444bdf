"""Replays real conversations through the control plane with a stand-in for the model, and measures how memory is used.

The scheduler, the block pool and the radix tree are the engine's own; the stand-in "samples" the answer that is on record. So the
block tables, hits and evictions are those of a real run, at some 100 times its speed.

    python -m benches.engine.replay
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
from dataclasses import dataclass

import numpy as np

from benches.data import sharegpt
from octavo._core import EngineCore, Gguf, Tokenizer
from octavo.benchmark.speed import WasteMeter
from octavo.engine.plan import SAMPLE, StepPlan
from octavo.models.catalog import resolve_model
from octavo.sampling_params import SamplingParams

BLOCK = 16
CONTIGUOUS = 4096


@dataclass
class Request:
    prompt: list[int]
    output: list[int]
    at: float = 0.0


class Replay:
    """An engine core whose requests produce given outputs."""

    def __init__(self, num_blocks: int, max_num_seqs: int, max_model_len: int, vocab_size: int) -> None:
        self.core = EngineCore(
            block_size=BLOCK,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=2048,
            max_model_len=max_model_len,
            max_in_flight=1,
            vocab_size=vocab_size,
            enable_prefix_caching=True,
            host_state=True,
            group_windows=[None],
            bytes_per_block=1,
            max_logprobs=0,
        )
        self.plan = StepPlan(self.core)
        self.mailbox = self.core.mailbox()
        self.requests: list[Request] = []
        self.of_slot = [0] * max_num_seqs
        self.length = [0] * max_num_seqs
        self.paged = WasteMeter()
        self.contiguous_filled = self.contiguous_allocated = 0.0

    def add(self, request: Request) -> None:
        params = SamplingParams(
            max_tokens=len(request.output), seed=len(self.requests), temperature=0.0, ignore_eos=True, detokenize=False
        )
        self.requests.append(request)
        self.core.add(request.prompt, params, self.mailbox, eos_token_ids=[], bad_words=[])

    def step(self) -> bool:
        """One step; False if there is nothing to do."""
        if not self.core.schedule(self.plan.buffer):
            return False
        plan = self.plan
        for entry in plan.slot_inits():
            self.of_slot[entry.slot] = entry.integer("seed_lo")
        slots, flags = plan.rows("slot").tolist(), plan.rows("flags").tolist()
        ends = (plan.rows("num_computed_tokens") + np.diff(plan.query_start_loc)).tolist()
        tokens = np.zeros((plan.num_rows, 1), dtype=np.int32)
        sampled = np.zeros(plan.num_rows, dtype=np.int32)
        for row, (slot, flag, end) in enumerate(zip(slots, flags, ends, strict=True)):
            request = self.requests[self.of_slot[slot]]
            if flag & SAMPLE:
                tokens[row, 0] = request.output[end - len(request.prompt)]
                sampled[row] = 1
        stats = self.core.stats()
        self.paged.sample(stats)
        self.contiguous_allocated += stats["num_running"] * CONTIGUOUS
        self.contiguous_filled += stats["filled_tokens"]
        self.core.commit(plan.step_id, tokens, sampled)
        self.mailbox.receive(0.0)
        return True

    def finish(self) -> None:
        """Every reference must be gone."""
        self.core.check_integrity()
        self.core.reset_prefix_cache()
        stats = self.core.stats()
        assert stats["free_blocks"] == stats["num_blocks"], stats


def tokenize(conversations: list[list[tuple[str, str]]]) -> tuple[list[list[tuple[list[int], list[int]]]], int]:
    """Token ids of each turn, in SmolLM2's vocabulary."""
    tokenizer = Tokenizer.from_gguf(Gguf(resolve_model().path))
    flat = tokenizer.encode_batch([text for turns in conversations for turn in turns for text in turn])
    pairs = iter(zip(flat[0::2], flat[1::2], strict=True))
    return [[next(pairs) for _ in turns] for turns in conversations], tokenizer.vocab_size


def waste(count: int, seed: int) -> dict[str, float]:
    """All conversations' first turns at once, 256 running at most: time-average of (allocated − filled) / allocated."""
    conversations, vocab = tokenize(sharegpt(count, seed))
    firsts = [turns[0] for turns in conversations]
    requests = [Request(q[:2048], a[:1500]) for q, a in firsts if q and a]
    tokens = sum(len(r.prompt) + len(r.output) for r in requests)
    replay = Replay(2 * tokens // BLOCK, 256, CONTIGUOUS, vocab)
    for request in requests:
        replay.add(request)
    while replay.step():
        pass
    replay.finish()
    return {
        "requests": len(requests),
        "mean_tokens": tokens / len(requests),
        "paged_waste": replay.paged.fraction,
        "contiguous_4096_waste": 1.0 - replay.contiguous_filled / replay.contiguous_allocated,
    }


def multi_turn(count: int, seed: int, pool_share: float) -> dict[str, float]:
    """Conversations that start one after the other and go on after a pause; the pool holds a share of all their blocks."""
    conversations, vocab = tokenize(sharegpt(count, seed, min_turns=2))
    trace = _trace(conversations, seed)
    longest = max(len(r.prompt) + len(r.output) for r in trace)
    blocks = len({key for r in trace for key in _keys(r.prompt + r.output)})
    pool = max(int(pool_share * blocks), 2 * -(-longest // BLOCK)) + 1
    replay = Replay(pool, 16, longest + BLOCK, vocab)
    clock = 0.0
    for request in trace:
        # One step takes 20 ms of the trace's time; requests that overlap share steps.
        while clock < request.at and replay.step():
            clock += 0.02
        clock = max(clock, request.at)
        replay.add(request)
    while replay.step():
        pass
    stats = replay.core.stats()
    replay.finish()
    hit_rate = stats["hit_tokens"] / stats["query_tokens"]
    best = _optimum(trace, pool - 1)
    return {
        "requests": len(trace),
        "distinct_blocks": blocks,
        "pool_blocks": pool - 1,
        "hit_rate": hit_rate,
        "optimal_hit_rate": best,
        "share_of_optimum": hit_rate / best,
        "preemptions": stats["preemptions"],
    }


def _trace(conversations: list[list[tuple[list[int], list[int]]]], seed: int) -> list[Request]:
    """Requests in order of arrival: a conversation every 2 s on average, 20 s on average from an answer to the next turn."""
    numbers = random.Random(seed)
    trace, start = [], 0.0
    for turns in conversations:
        start += numbers.expovariate(1 / 2.0)
        at, history = start, []
        for question, answer in turns:
            if not question or not answer or len(history) + len(question) + len(answer) > CONTIGUOUS:
                break
            trace.append(Request([*history, *question], answer, at))
            history = [*history, *question, *answer]
            at += 0.02 * len(answer) + numbers.expovariate(1 / 20.0)
    return sorted(trace, key=lambda request: request.at)


def _keys(tokens: list[int]) -> list[int]:
    """A name for each full block's whole prefix."""
    keys, key = [], 0
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        key = hash((key, *tokens[end - BLOCK : end]))
        keys.append(key)
    return keys


def _optimum(trace: list[Request], capacity: int) -> float:
    """Hit rate of Belady's rule (evict what is used farthest in the future) on the same requests, one after the other.

    An upper bound: the rule knows the future, and running requests take no room from it.
    """
    paths = [_keys(r.prompt + r.output) for r in trace]
    uses: dict[int, list[int]] = {}
    for index, path in enumerate(paths):
        for key in path:
            uses.setdefault(key, []).append(index)
    for later in uses.values():
        later.reverse()
    cached: dict[int, int] = {}
    farthest: list[tuple[int, int]] = []
    hits = queried = 0
    for index, (request, path) in enumerate(zip(trace, paths, strict=True)):
        known = len(request.prompt)
        queried += known
        for key in path[: (known - 1) // BLOCK]:
            if key not in cached:
                break
            hits += BLOCK
        for key in path:
            later = uses[key]
            while later and later[-1] <= index:
                later.pop()
            cached[key] = later[-1] if later else 1 << 60
            heapq.heappush(farthest, (-cached[key], key))
        while len(cached) > capacity:
            when, key = heapq.heappop(farthest)
            if cached.get(key) == -when:
                del cached[key]
    return hits / queried


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--pool-share", type=float, default=0.25, help="pool of the multi-turn trace, of its working set"
    )
    arguments = parser.parse_args()
    print(json.dumps({"waste": waste(arguments.conversations, arguments.seed)}, indent=2), flush=True)
    found = multi_turn(arguments.conversations, arguments.seed, arguments.pool_share)
    print(json.dumps({"multi_turn": found}, indent=2), flush=True)


if __name__ == "__main__":
    main()
