"""What broke other servers: stops over many tokens, characters over many tokens, priorities, leaks, idle cores, huge bodies."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.engine.speaker import make_speaker
from tests.engine.test_messages import HERMES, HERMES_TEXT, MESSAGES
from tests.server.conftest import EXACT
from tests.server.running import Server, events
from tests.server.speaking import Speak
from tests.server.test_metrics import scrape

LONG = {"prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True, "temperature": 0}
STORY = "Once upon a time 😀, in Köln or 日本, there was a cat. The cat sat on a mat; the END."
CHAT = {"messages": [{"role": "user", "content": "go"}], "temperature": 0, "max_tokens": 400}


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model that says `STORY`."""
    running = Server.start(str(make_speaker(tmp_path_factory.mktemp("story"), STORY, MESSAGES, ())), *EXACT)
    yield running
    running.stop()


def streamed(server: Server, body: dict[str, Any]) -> tuple[list[str], str | None, Any]:
    """Deltas of the content, the reason of the end, and what stopped it."""
    choices = [event["choices"][0] for event in server.stream("/v1/chat/completions", body)]
    deltas = [choice["delta"].get("content") or "" for choice in choices]
    return deltas, choices[-1]["finish_reason"], choices[-1].get("stop_reason")


def test_characters_come_whole_however_many_tokens_they_take(story: Server) -> None:
    deltas, reason, _ = streamed(story, CHAT)
    assert "".join(deltas) == STORY
    assert reason == "stop"
    assert not any("\ufffd" in delta for delta in deltas)
    assert sum(bool(delta) for delta in deltas) > 10, "it is streamed, not collected"
    whole = story.post("/v1/chat/completions", {**CHAT, "logprobs": True}).body["choices"][0]
    assert whole["message"]["content"] == STORY
    tokens = whole["logprobs"]["content"]
    assert any("\ufffd" in token["token"] for token in tokens), "some character is in two tokens"
    assert b"".join(bytes(token["bytes"]) for token in tokens).decode() == STORY + "<eos>"


@pytest.mark.parametrize(
    ("stop", "text", "met"),
    [
        (["there was"], STORY[: STORY.index("there was")], "there was"),
        (["a mat", "The cat", "END"], STORY[: STORY.index("The cat")], "The cat"),
        (["END", "The cat", "a mat"], STORY[: STORY.index("The cat")], "The cat"),
        (["日本"], STORY[: STORY.index("日本")], "日本"),
        (["the ENDING", "mat; the END!"], STORY, None),
        (["O"], "", "O"),
    ],
)
def test_a_stop_is_cut_exactly_and_what_does_not_complete_loses_nothing(
    story: Server, stop: list[str], text: str, met: str | None
) -> None:
    deltas, reason, stopped = streamed(story, {**CHAT, "stop": stop})
    assert ("".join(deltas), reason, stopped) == (text, "stop", met)
    choice = story.post("/v1/chat/completions", {**CHAT, "stop": stop}).body["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", met)
    assert story.wait_idle()


def test_reasoning_comes_before_the_content_and_both_character_by_character(speak: Speak) -> None:
    running = speak(HERMES_TEXT, HERMES, ())
    deltas = [e["choices"][0]["delta"] for e in running.stream("/v1/chat/completions", CHAT)]
    kinds = [kind for d in deltas for kind in ("reasoning_content", "content") if d.get(kind)]
    assert kinds == sorted(kinds, reverse=True)
    joined = "".join(d.get("reasoning_content") or "" for d in deltas)
    assert joined.strip() == "Die Frage ist: 日本 oder Köln? 😀"


def test_an_urgent_request_is_next_however_many_wait(start: Callable[..., Server]) -> None:
    running = start("--max-num-seqs", "1")

    def open_stream(priority: int, tokens: int) -> Any:
        # The answer's head is here once the request is in the queue.
        body = {**LONG, "max_tokens": tokens, "stream": True, "priority": priority}
        return running.send("POST", "/v1/completions", body)

    first = open_stream(0, 400)
    next(events(first))
    waiting = [open_stream(priority, 40) for priority in (1, 1, 1, 1, -1)]
    order: list[int] = []
    lock = threading.Lock()

    def read(number: int) -> None:
        whole = list(events(waiting[number]))
        assert len(whole) == 40
        with lock:
            order.append(number)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(read, range(5)))
    assert order[0] == 4


def test_requests_that_are_dropped_in_any_state_leave_no_block_behind(start: Callable[..., Server]) -> None:
    running = start("--max-num-seqs", "4", "--num-gpu-blocks-override", "60", "--no-enable-prefix-caching")
    before = scrape(running)
    assert before['octavo:kv_cache_usage_perc{engine="0"}'] == 0
    for number in range(100):
        body = {
            **LONG,
            "prompt": [5 + number % 7] * (1 + number * 37 % 300),
            "n": 1 + number % 2,
            "stream": number % 3 > 0,
        }
        connection = running.connect()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        if number % 3 == 1:
            connection.getresponse().readline()
        elif number % 4 == 0:
            time.sleep(0.02)
        connection.close()
    assert running.wait_idle()
    after = scrape(running)
    assert after['octavo:kv_cache_usage_perc{engine="0"}'] == 0
    assert after['octavo:num_requests_running{engine="0"}'] == after['octavo:num_requests_waiting{engine="0"}'] == 0
    assert running.post("/v1/completions", {**LONG, "max_tokens": 3}).status == 200


def cpu_seconds(pid: int) -> float:
    fields = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()  # noqa: SIM115
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_an_idle_server_takes_no_cpu(server: Server) -> None:
    assert server.post("/v1/completions", {**LONG, "max_tokens": 1}).status == 200
    pids = (server.process.pid, server.engine_pid())
    before = [cpu_seconds(pid) for pid in pids]
    time.sleep(4)
    assert [cpu_seconds(pid) - start for pid, start in zip(pids, before, strict=True)] == pytest.approx(
        [0, 0], abs=0.05
    )


def test_a_huge_prompt_is_refused_and_health_answers_meanwhile(server: Server) -> None:
    huge = json.dumps({"prompt": "the tart " * (2 << 20)}).encode()
    with ThreadPoolExecutor(3) as pool:
        replies = [pool.submit(server.post, "/v1/completions", huge) for _ in range(3)]
        answered = 0
        while not all(reply.done() for reply in replies):
            assert server.get("/health").status == 200
            answered += 1
            time.sleep(0.02)
    assert answered > 0
    for reply in replies:
        assert reply.result().status == 400
        assert reply.result().error["code"] == "context_length_exceeded"


def test_a_long_prompt_does_not_stop_those_that_run(start: Callable[..., Server]) -> None:
    running = start("--max-num-batched-tokens", "64")
    stream = events(running.send("POST", "/v1/completions", {**LONG, "stream": True}))
    next(stream)
    with ThreadPoolExecutor(2) as pool:
        long = pool.submit(running.post, "/v1/completions", {"prompt": [9] * 500, "max_tokens": 1})
        short = pool.submit(running.post, "/v1/completions", {"prompt": [8], "max_tokens": 1})
        assert short.result().status == long.result().status == 200
        # Both were answered while the stream went on.
        assert sum(1 for _ in stream) == 399
