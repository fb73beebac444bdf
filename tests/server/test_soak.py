"""Hours of mixed use, in short: streams, bad input, slow readers, clients that leave; nothing is lost and nothing grows."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import Server, events
from tests.server.test_metrics import scrape

CLIENTS = 12
HEALTH_EVERY = 0.05
HEALTH_P99 = 0.05
"""Seconds."""
LONG = 60.0
"""A run of so many seconds proves something about time and memory."""


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Client:
    """One client after the other on one thread: each asks for something, and checks what it gets."""

    def __init__(self, server: Server, seed: int, stop: threading.Event) -> None:
        self.server = server
        self.draw = random.Random(seed)
        self.stop = stop
        self.done: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        kinds = [self.whole, self.whole, self.streamed, self.streamed, self.chat, self.slow, self.leaving, self.wrong]
        while not self.stop.is_set():
            kind = self.draw.choice(kinds)
            kind()
            self.done[kind.__name__] += 1
        return self.done

    def body(self, **more: Any) -> dict[str, Any]:
        prompt = [self.draw.randrange(3, 300) for _ in range(self.draw.choice([1, 5, 40, 200]))]
        tokens = self.draw.randrange(1, 40)
        return {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "seed": self.draw.randrange(100), **more}

    def whole(self) -> None:
        body = self.body(n=self.draw.choice([1, 1, 3]), logprobs=self.draw.choice([None, 2]))
        reply = self.server.post("/v1/completions", body)
        assert reply.status == 200, reply.text
        assert reply.body["usage"]["completion_tokens"] == body["n"] * body["max_tokens"]

    def streamed(self) -> None:
        body = self.body()
        assert sum(1 for _ in self.server.stream("/v1/completions", body)) == body["max_tokens"]

    def chat(self) -> None:
        asked = [{"role": "user", "content": "tart " * self.draw.randrange(1, 20)}]
        body = {"messages": asked, "max_tokens": 20, "ignore_eos": True, "seed": 1}
        chunks = list(self.server.stream("/v1/chat/completions", body))
        assert len(chunks) == 22
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"

    def slow(self) -> None:
        body = self.body(stream=True)
        response = self.server.send("POST", "/v1/completions", body)
        time.sleep(self.draw.uniform(0.0, 0.3))
        assert sum(1 for _ in events(response)) == body["max_tokens"]

    def leaving(self) -> None:
        connection = self.server.connect()
        body = self.body(max_tokens=400, n=2, stream=self.draw.random() < 0.5)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        if body["stream"]:
            connection.getresponse().readline()
        connection.close()

    def wrong(self) -> None:
        change = self.draw.choice([{"temperature": -1}, {"prompt": []}, {"prompt": [10**6]}, {"x": 1}, {"n": 0}])
        assert self.server.post("/v1/completions", {**self.body(), **change}).status == 400


def watch_health(server: Server, stop: threading.Event) -> list[float]:
    """Seconds that each `/health` took, on one connection."""
    connection, taken = server.connect(), []
    while not stop.wait(HEALTH_EVERY):
        start = time.perf_counter()
        connection.request("GET", "/health")
        response = connection.getresponse()
        response.read()
        taken.append(time.perf_counter() - start)
        assert response.status == 200
    return sorted(taken)


@pytest.mark.parametrize(
    "seconds", [15.0, pytest.param(float(os.environ.get("OCTAVO_SOAK_SECONDS", "1800")), marks=pytest.mark.slow)]
)
@pytest.mark.timeout(7200)
def test_mixed_use_loses_nothing_and_grows_nothing(start: Callable[..., Server], seconds: float) -> None:
    running = start("--max-num-seqs", "16", "--num-gpu-blocks-override", "120")
    stop = threading.Event()
    clients = [Client(running, seed, stop) for seed in range(CLIENTS)]
    pids = (running.process.pid, running.engine_pid())
    with ThreadPoolExecutor(CLIENTS + 1) as pool:
        health = pool.submit(watch_health, running, stop)
        working = [pool.submit(client.run) for client in clients]
        # Allocators and caches fill first.
        time.sleep(seconds / 3)
        before = [resident_bytes(pid) for pid in pids]
        time.sleep(seconds * 2 / 3)
        stop.set()
        done = sum((one.result() for one in working), Counter())
    after = [resident_bytes(pid) for pid in pids]
    taken = health.result()
    median, p99 = taken[len(taken) // 2], taken[len(taken) * 99 // 100]
    assert running.wait_idle()
    told = scrape(running)
    assert told['octavo:kv_cache_usage_perc{engine="0"}'] == 0
    assert told['octavo:engine_restarts_total{engine="0"}'] == 0
    assert not [name for name in told if 'status="5' in name and "/ready" not in name], "no fault of the server's"
    assert set(done) == {"whole", "streamed", "chat", "slow", "leaving", "wrong"}
    print(f"{done.total()} requests in {seconds:.0f} s: {dict(done)}; resident bytes {before} then {after}")
    print(f"/health of {len(taken)}: median {median * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms")
    # A short run has not filled every allocator and cache, and is no measure of time.
    slack = 0 if seconds >= LONG else 16 << 20
    for small, large in zip(before, after, strict=True):
        assert large < small * 1.05 + slack, (before, after)
    if seconds >= LONG:
        assert p99 < HEALTH_P99
