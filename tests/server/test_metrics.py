"""`/metrics`: what the documentation lists, no more and no less, and that it counts."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tests.server.running import Server

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
BODY = {"prompt": [5, 6, 7], "max_tokens": 5, "n": 2, "ignore_eos": True, "seed": 1}


def scrape(server: Server) -> dict[str, float]:
    reply = server.get("/metrics")
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("application/openmetrics-text")
    lines = reply.text.splitlines()
    assert lines[-1] == "# EOF"
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def test_the_documentation_lists_every_metric_and_no_other(server: Server) -> None:
    text = server.get("/metrics").text
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    listed = dict(re.findall(r"^\| `(octavo:\w+)` \| (\w+) \|", DOCUMENT.read_text(), re.MULTILINE))
    told = {name + ("_total" if kind == "counter" else ""): kind for name, kind in kinds.items()}
    assert listed == told


def test_tokens_and_ends_are_counted(start: Callable[..., Server]) -> None:
    running = start()
    before = scrape(running)
    assert running.post("/v1/completions", BODY).status == 200
    assert len(list(running.stream("/v1/completions", BODY))) == 10
    assert running.post("/v1/completions", {**BODY, "n": 0}).status == 400
    after = scrape(running)
    gained = {name: after[name] - before.get(name, 0) for name in after}
    assert gained["octavo:prompt_tokens_total"] == 6
    assert gained["octavo:generation_tokens_total"] == 20
    assert gained['octavo:request_success_total{finished_reason="length"}'] == 4
    assert gained["octavo:time_to_first_token_seconds_count"] == 4
    assert gained["octavo:inter_token_latency_seconds_count"] == 16
    assert gained["octavo:request_generation_tokens_sum"] == 20
    assert gained['octavo:http_requests_total{handler="/v1/completions",status="200"}'] == 2
    assert gained['octavo:http_requests_total{handler="/v1/completions",status="400"}'] == 1
    assert gained['octavo:prefix_cache_queries_total{engine="0"}'] > 0
    assert after['octavo:num_requests_running{engine="0"}'] == after['octavo:num_requests_waiting{engine="0"}'] == 0
    assert after['octavo:engine_up{engine="0"}'] == 1
    assert after['octavo:kv_cache_usage_perc{engine="0"}'] == 0
