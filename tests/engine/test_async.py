"""Delivery of `AsyncLLM` and the end of an engine: nobody waits for ever, nothing is kept for nobody."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from octavo import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from octavo.async_llm import deliver
from octavo.errors import ParameterError

SETTINGS: dict[str, Any] = {"backend": "reference", "dtype": "float32", "disable_log_stats": True}
PARAMS = SamplingParams(max_tokens=30, ignore_eos=True, seed=1)


class FakeCore:
    """Is shut down by the first `receive`, which times out; the last update comes with the second."""

    def __init__(self) -> None:
        self.ended = False
        self.aborted: list[int] = []
        self.batches = [[], [SimpleNamespace(request_id=1), SimpleNamespace(request_id=2)], []]

    def is_shut_down(self) -> bool:
        return self.ended

    def receive(self, timeout: float) -> list[Any]:
        self.ended = True
        return self.batches.pop(0)

    def abort(self, request_id: int) -> None:
        self.aborted.append(request_id)


class FakeLoop:
    """An event loop that runs a callback at once, or is closed."""

    def __init__(self, closed: bool) -> None:
        self.closed = closed

    def call_soon_threadsafe(self, callback: Callable[..., None], *args: Any) -> None:
        if self.closed:
            raise RuntimeError("Event loop is closed")
        callback(*args)


def test_an_update_that_comes_with_the_shutdown_is_delivered_and_a_closed_loop_stops_nobody_else() -> None:
    core, queue = FakeCore(), asyncio.Queue[Any]()
    queues: Any = {1: (FakeLoop(closed=True), asyncio.Queue()), 2: (FakeLoop(closed=False), queue)}
    deliver(core, core, queues, threading.Lock())  # type: ignore[arg-type]
    assert queue.get_nowait().request_id == 2
    assert core.batches == []
    assert core.aborted == [1]
    assert list(queues) == [2]


def test_a_reader_that_comes_late_gets_one_larger_output(tiny_model: Path) -> None:
    llm = AsyncLLM(str(tiny_model), **SETTINGS)

    async def main() -> list[int]:
        lengths = []
        async for output in llm.generate([5, 6, 7], PARAMS):
            lengths.append(len(output.outputs[0].token_ids))
            while llm.stats()["num_running"]:  # this loop takes no updates meanwhile
                await asyncio.to_thread(lambda: None)
            await asyncio.sleep(0.2)
        return lengths

    try:
        lengths = asyncio.run(main())
    finally:
        llm.shutdown()
    assert lengths[-1] == 30
    assert len(lengths) <= 2


def test_a_shutdown_ends_every_stream(tiny_model: Path) -> None:
    llm = AsyncLLM(str(tiny_model), **SETTINGS)

    async def client(index: int) -> str | None:
        reason = None
        async for output in llm.generate([5, 6, 7 + index], SamplingParams(max_tokens=500, ignore_eos=True)):
            reason = output.outputs[0].finish_reason
        return reason

    async def main() -> list[str | None]:
        clients = [asyncio.create_task(client(i)) for i in range(4)]
        while llm.stats()["num_running"] < 4:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(llm.shutdown)
        return await asyncio.wait_for(asyncio.gather(*clients), 30)

    assert asyncio.run(main()) == ["abort"] * 4


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_a_forgotten_engine_stops_and_gives_its_model_back(tiny_model: Path, kind: type[Any]) -> None:
    llm = kind(str(tiny_model), **SETTINGS)
    if kind is LLM:
        llm.generate([[5, 6, 7]], PARAMS, use_tqdm=False)
    thread, model = llm.engine._thread, weakref.ref(llm.engine._started.model.decoder)
    del llm
    gc.collect()
    assert not thread.is_alive()
    assert model() is None


def test_an_aborted_batch_leaves_no_news_behind(make_llm: Callable[..., LLM]) -> None:
    engine = make_llm().engine
    with engine.submit([engine.submission_of_ids([5, 6, 7], PARAMS) for _ in range(3)]) as batch:
        pass
    assert batch.mailbox.receive(0.0) == []


def test_a_beam_wider_than_the_logprobs_allow_is_refused_by_name(make_llm: Callable[..., LLM]) -> None:
    with pytest.raises(ParameterError, match="at most 10") as caught:
        make_llm().beam_search([[5, 6]], BeamSearchParams(beam_width=11, max_tokens=2))
    assert caught.value.param == "beam_width"
