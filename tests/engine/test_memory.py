"""Preemption, aborts, fairness, priorities, cache size, idleness."""

from __future__ import annotations

import asyncio
import itertools
import random
import resource
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, AsyncLLM, SamplingParams
from octavo.errors import ContextLengthError, EngineError, ParameterError
from tests.engine.conftest import assert_released

PROMPTS = [[(i * (j + 3)) % 300 + 10 for i in range(20 + 5 * j)] for j in range(6)]


@pytest.fixture
def make_async(tiny_model: Path) -> Iterator[Callable[..., AsyncLLM]]:
    made: list[AsyncLLM] = []

    def make(**kwargs: Any) -> AsyncLLM:
        settings = {"backend": "reference", "dtype": "float32", "disable_log_stats": True, **kwargs}
        made.append(AsyncLLM(str(tiny_model), **settings))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()


async def drain(stream: AsyncIterator[Any]) -> Any:
    last = None
    async for output in stream:
        last = output
    return last


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_a_pool_for_two_gives_six_requests_the_same_tokens_as_a_large_one(
    make_llm: Callable[..., LLM], temperature: float, in_flight: int
) -> None:
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=100, ignore_eos=True) for i in range(6)]
    expected = [o.outputs[0].token_ids for o in make_llm().generate(PROMPTS, params, use_tqdm=False)]
    small = make_llm(num_gpu_blocks_override=1 + 20, max_model_len=320, max_in_flight=in_flight)
    outputs = small.generate(PROMPTS, params, use_tqdm=False)
    assert small.stats()["preemptions"] > 0
    assert [o.outputs[0].token_ids for o in outputs] == expected
    assert all(o.outputs[0].finish_reason == "length" for o in outputs)


def test_aborted_streams_in_every_state_give_their_blocks_back(make_async: Callable[..., AsyncLLM]) -> None:
    llm = make_async(num_gpu_blocks_override=1 + 24, max_model_len=300, max_num_seqs=4, max_num_batched_tokens=32)
    numbers = random.Random(5)

    async def client(index: int) -> None:
        prompt = [numbers.randrange(10, 310) for _ in range(numbers.choice([5, 60, 200]))]
        stream = llm.generate(prompt, SamplingParams(max_tokens=40, ignore_eos=True, seed=index))
        keep = numbers.random() < 0.2
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(drain(stream), None if keep else numbers.choice([0.0, 0.01, 0.1, 0.4]))

    async def main() -> Any:
        for _ in range(10):
            await asyncio.gather(*(client(i) for i in range(30)))
        return await drain(llm.generate([7, 8, 9], SamplingParams(max_tokens=5, ignore_eos=True)))

    assert len(asyncio.run(main()).outputs[0].token_ids) == 5
    assert_released(llm)  # type: ignore[arg-type]


def test_a_closed_stream_stops_its_work(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=400, ignore_eos=True))
    next(stream)
    stream.close()
    time.sleep(0.2)
    before = llm.stats()["generation_tokens"]
    time.sleep(0.2)
    assert llm.stats()["generation_tokens"] == before
    assert llm.stats()["num_running"] == 0


def test_a_long_prompt_neither_freezes_a_running_stream_nor_a_short_newcomer(
    make_async: Callable[..., AsyncLLM],
) -> None:
    llm = make_async(max_num_batched_tokens=32)
    events: list[str] = []

    async def watch(name: str, prompt: list[int], tokens: int, ready: asyncio.Event | None = None) -> None:
        first = True
        async for _ in llm.generate(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True)):
            events.append(f"{name}0" if first else name)
            first = False
            if ready is not None:
                ready.set()

    async def main() -> None:
        running = asyncio.Event()
        a = asyncio.create_task(watch("A", [5, 6, 7], 200, running))
        await running.wait()
        llm.engine.core.pause()  # so that B is ahead of C by its place in the queue alone
        b = asyncio.create_task(watch("B", [(i * 3) % 300 + 10 for i in range(480)], 4))
        while len(llm._queues) < 2:
            await asyncio.sleep(0.01)
        c = asyncio.create_task(watch("C", [(i * 5) % 300 + 10 for i in range(20)], 4))
        while len(llm._queues) < 3:
            await asyncio.sleep(0.01)
        llm.engine.core.resume()
        await asyncio.gather(a, b, c)

    asyncio.run(main())
    assert events.index("C0") < events.index("B0")
    # B's prompt takes at least 480 / 32 = 15 steps; A has gained a token in each of them.
    assert events[: events.index("B0")].count("A") >= 10


def test_an_urgent_request_overtakes_the_waiting(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_num_seqs=1)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    engine = llm.engine
    submissions = [engine.submission_of_ids(PROMPTS[i % 6], params) for i in range(9)]
    for low in submissions[:8]:
        low.priority = 5
    submissions[8].priority = -1
    order = []
    with engine.submit(submissions) as batch:
        for output in batch.updates():
            order.append(int(output.request_id))
    first = min(order)
    assert order.index(first + 8) <= 1, "only the one that was running already ends before it"


def test_a_cache_for_512_tokens_says_what_fits(make_llm: Callable[..., LLM]) -> None:
    with pytest.raises(ParameterError, match="at most 496") as caught:
        make_llm(max_model_len=512, num_gpu_blocks_override=32)
    assert caught.value.param == "max_model_len"
    llm = make_llm(num_gpu_blocks_override=11)
    assert llm.engine.max_model_len == 160
    with pytest.raises(ParameterError, match="kv_cache_memory_bytes"):
        make_llm(kv_cache_memory_bytes=10)


@pytest.mark.parametrize("length", [320, 321, 3200])
def test_a_prompt_that_leaves_no_room_is_refused_with_the_numbers(make_llm: Callable[..., LLM], length: int) -> None:
    llm = make_llm(max_model_len=320)
    with pytest.raises(ContextLengthError, match="320") as caught:
        llm.generate([[5] * length], SamplingParams(max_tokens=1), use_tqdm=False)
    assert caught.value.code == "context_length_exceeded"
    output = llm.generate([[5] * 319], SamplingParams(max_tokens=50, ignore_eos=True), use_tqdm=False)[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (1, "length")


@pytest.mark.parametrize("chunk", [1, 7, 16, 17, 64])
def test_a_chunked_prompt_gives_the_same_tokens_as_a_whole_one(make_llm: Callable[..., LLM], chunk: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    expected = [o.outputs[0].token_ids for o in make_llm().generate(PROMPTS, params, use_tqdm=False)]
    llm = make_llm(max_num_batched_tokens=chunk)
    assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params, use_tqdm=False)] == expected


def test_an_idle_engine_uses_no_cpu(make_async: Callable[..., AsyncLLM]) -> None:
    llm = make_async()
    asyncio.run(drain(llm.generate([5, 6], SamplingParams(max_tokens=3))))

    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime

    time.sleep(0.5)
    before = used()
    time.sleep(3.0)
    assert used() - before < 0.05, "1 CPU second in 60 idle ones"


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_request_whose_logits_are_nan_ends_with_error_and_its_neighbours_go_on(
    make_llm: Callable[..., LLM], in_flight: int
) -> None:
    llm = make_llm(max_in_flight=in_flight)
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    expected = [o.outputs[0].token_ids for o in llm.generate(PROMPTS[:3], params, use_tqdm=False)]
    engine, decoder = llm.engine, llm.engine._started.runner.decoder
    whole, calls = decoder.logits, itertools.count()

    def damaged(hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        logits = whole(hidden, out)
        if next(calls) == 4:
            logits[1] = torch.nan
        return logits

    decoder.logits = damaged  # type: ignore[method-assign]
    engine.core.pause()  # so that all three begin with the same step
    with engine.submit([engine.submission_of_ids(p, params) for p in PROMPTS[:3]]) as batch:
        engine.core.resume()
        choices = [o.outputs[0] for o in batch.collect(lambda _: None)]
    assert sorted(c.finish_reason or "" for c in choices) == ["error", "length", "length"]
    for choice, tokens in zip(choices, expected, strict=True):
        assert choice.token_ids == (tokens if choice.finish_reason == "length" else tokens[:4])


def test_after_a_failure_of_the_model_every_request_is_told_and_no_one_hangs(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()

    def broken(*_: object) -> None:
        raise RuntimeError("the device is gone")

    llm.engine._started.runner.forward = broken  # type: ignore[method-assign, assignment]
    with pytest.raises(EngineError, match="the device is gone"):
        llm.generate(PROMPTS, SamplingParams(max_tokens=4), use_tqdm=False)
    with pytest.raises(EngineError, match="the device is gone"):
        llm.generate(PROMPTS, SamplingParams(max_tokens=4), use_tqdm=False)
