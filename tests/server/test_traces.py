"""`--otlp-endpoint`: a span of each generation reaches a collector, in its client's trace; one that fails harms nobody."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.server.running import START_SECONDS, Server

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
BODY = {"prompt": [5, 6, 7], "max_tokens": 4, "n": 2, "ignore_eos": True, "temperature": 0.7, "top_k": 20}


class Collector:
    """Takes OTLP over HTTP and keeps the spans."""

    def __init__(self, status: int = 200) -> None:
        self.spans: list[dict[str, Any]] = []
        self.requests: list[tuple[str, str]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                for resource in body["resourceSpans"]:
                    named = {one["key"]: one["value"] for one in resource["resource"]["attributes"]}
                    assert named["service.name"] == {"stringValue": "octavo"}
                    for scope in resource["scopeSpans"]:
                        collector.spans += scope["spans"]
                collector.requests.append((self.path, self.headers["Content-Type"]))
                self.send_response(status)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def wait(self, count: int) -> list[dict[str, Any]]:
        end = time.monotonic() + START_SECONDS
        while len(self.spans) < count:
            assert time.monotonic() < end, self.spans
            time.sleep(0.02)
        return self.spans


@pytest.fixture
def collect() -> Iterator[Callable[..., Collector]]:
    running: list[Collector] = []

    def make(**kwargs: Any) -> Collector:
        running.append(Collector(**kwargs))
        return running[-1]

    yield make
    for one in running:
        one.server.shutdown()


def value(told: dict[str, Any]) -> Any:
    ((kind, found),) = told.items()
    if kind == "arrayValue":
        return [value(one) for one in found["values"]]
    return int(found) if kind == "intValue" else found


def attributes(span: dict[str, Any]) -> dict[str, Any]:
    return {one["key"]: value(one["value"]) for one in span["attributes"]}


def test_a_generation_is_a_span_of_its_clients_trace(
    start: Callable[..., Server], collect: Callable[..., Collector]
) -> None:
    collector = collect()
    running = start("--otlp-endpoint", collector.url, "--served-model-name", "tiny")
    before = time.time_ns()
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
    assert running.post("/v1/completions", BODY, headers=headers).status == 200
    assert len(list(running.stream("/v1/completions", BODY))) == 8
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "temperature": 0}
    assert running.post("/v1/chat/completions", chat).status == 200
    assert running.post("/v1/completions", {**BODY, "n": 0}).status == 400
    # Not a generation, and one that its client does not sample.
    assert running.post("/tokenize", {"prompt": "a"}).status == 200
    unsampled = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    assert running.post("/v1/completions", BODY, headers=unsampled).status == 200
    whole, streamed, talked, refused = collector.wait(4)[:4]
    assert set(collector.requests) == {("/v1/traces", "application/json")}

    assert (whole["traceId"], whole["parentSpanId"], whole["traceState"]) == (TRACE, PARENT, "vendor=1")
    assert (whole["name"], whole["kind"], whole["status"]) == ("text_completion tiny", 2, {})
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "octavo",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.7,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 20.0,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.finish_reasons": ["length", "length"],
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": 8,
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
    }
    found = attributes(whole)
    assert {name: found.get(name) for name in expected} == expected
    for span in (whole, streamed, talked):
        begin, end = int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])
        (first,) = span["events"]
        assert before < begin < int(first["timeUnixNano"]) <= end < time.time_ns()
        waited = (int(first["timeUnixNano"]) - begin) / 1e9
        assert attributes(span)["gen_ai.latency.time_to_first_token"] == pytest.approx(waited)
    assert "parentSpanId" not in streamed
    assert attributes(streamed)["gen_ai.usage.output_tokens"] == 8
    assert attributes(talked)["gen_ai.operation.name"] == "chat"
    assert attributes(refused)["http.response.status_code"] == 400
    assert len({span["spanId"] for span in collector.spans}) == len({span["traceId"] for span in collector.spans}) == 4

    # The next one to come is the fifth: nothing was told of the two in between.
    assert running.post("/v1/completions", {**BODY, "n": 1}).status == 200
    assert attributes(collector.wait(5)[4])["gen_ai.request.choice.count"] == 1


def test_a_collector_that_fails_costs_its_spans_and_nothing_else(
    start: Callable[..., Server], collect: Callable[..., Collector]
) -> None:
    collector = collect(status=500)
    running = start("--otlp-endpoint", collector.url)
    for _ in range(3):
        assert running.post("/v1/completions", BODY).status == 200
    assert "500" in running.wait_line("spans were lost")
    assert running.stop() == 0


def test_an_endpoint_that_cannot_be_is_refused_at_the_start(start: Callable[..., Server]) -> None:
    with pytest.raises(AssertionError, match="otlp_endpoint must be an http:// URL"):
        start("--otlp-endpoint", "https://collector:4318")
