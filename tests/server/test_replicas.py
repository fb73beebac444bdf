"""Two engine processes behind one front: prefixes find their replica, and one may die, hang or be replaced while the other runs."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.running import Server
from tests.server.test_crash import ask_all, assert_same, bodies
from tests.server.test_metrics import scrape

TWO = ("--data-parallel-size", "2", "--num-threads", "1")


@pytest.fixture
def pair(start: Callable[..., Server]) -> Server:
    """A server of two replicas, both ready."""
    running = start(*TWO, "--engine-timeout", "2")
    running.wait_count("octavo: ready: engine", 2)
    return running


def cached_tokens(server: Server, prompt: list[int], **more: Any) -> int:
    reply = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1, **more})
    assert reply.status == 200, reply.text
    tokens: int = reply.body["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def test_prompts_go_where_their_beginning_is_cached_and_fill_both_caches(pair: Server) -> None:
    groups = [[10 + group] * 160 for group in range(6)]
    for prompt in groups:
        assert cached_tokens(pair, prompt) == 0
    for number in range(3):
        for prompt in groups:
            assert cached_tokens(pair, [*prompt, 100 + number, 7]) == 160
    told = scrape(pair)
    counts = [told[f'octavo:prefix_cache_queries_total{{engine="{engine}"}}'] for engine in (0, 1)]
    assert counts[0] == counts[1], "three groups each"


def test_a_salt_keeps_prefixes_apart(pair: Server) -> None:
    prompt = [42] * 100
    assert cached_tokens(pair, prompt, cache_salt="mine") == 0
    assert cached_tokens(pair, prompt, cache_salt="yours") == 0
    assert cached_tokens(pair, prompt, cache_salt="mine") == 96


def watch_ready(server: Server, stop: threading.Event) -> list[int]:
    """Every status of `/ready` that is not 200."""
    wrong = []
    while not stop.wait(0.02):
        status = server.get("/ready").status
        if status != 200:
            wrong.append(status)
    return wrong


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_the_requests_of_a_replica_that_dies_or_hangs_go_on_and_no_client_sees_it(
    pair: Server, blow: signal.Signals
) -> None:
    requests = bodies(16)
    undisturbed = ask_all(pair, requests)
    victim, other = pair.engine_pids()
    stop = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        wrong = pool.submit(watch_ready, pair, stop)
        replies = pool.submit(ask_all, pair, requests)
        time.sleep(0.3)
        os.kill(victim, blow)
        assert_same(replies.result(), undisturbed)
        stop.set()
        assert wrong.result() == [], "the other one takes requests all the time"
    if blow == signal.SIGKILL:
        pair.wait_line("is ready again")
    assert other in pair.engine_pids()


def test_both_die_and_everything_goes_on(pair: Server) -> None:
    requests = bodies(16)
    undisturbed = ask_all(pair, requests)
    with ThreadPoolExecutor(1) as pool:
        replies = pool.submit(ask_all, pair, requests)
        for victim in pair.engine_pids():
            time.sleep(0.2)
            os.kill(victim, signal.SIGKILL)
        assert_same(replies.result(), undisturbed)


def test_engines_are_replaced_one_by_one_and_nothing_is_refused(pair: Server) -> None:
    requests = bodies(8)
    undisturbed = ask_all(pair, requests)
    before = set(pair.engine_pids())
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        wrong = pool.submit(watch_ready, pair, stop)
        pair.process.send_signal(signal.SIGHUP)
        while sum("is ready again" in line for line in pair.lines) < 2:
            assert_same(ask_all(pair, requests), undisturbed)
        stop.set()
        assert wrong.result() == []
    assert not before & set(pair.engine_pids())
    told = [line for line in pair.lines if "restarting engine" in line or "is ready again" in line]
    assert [line.split("engine ")[1][0] for line in told] == ["0", "0", "1", "1"], "one at a time"
    assert pair.stop() == 0
