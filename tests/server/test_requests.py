"""What the server refuses: in the protocol's form, naming the field, before anything runs; and it answers the next request."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.server.running import Server

VOCAB = 320
CONTEXT = 512
COMPLETION = {"prompt": "a tart", "max_tokens": 2, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "a tart"}], "max_tokens": 2, "temperature": 0}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

# Field, and values that it must not have; for both endpoints.
WRONG_SAMPLING: list[tuple[str, Any]] = [
    ("temperature", -1),
    ("temperature", 1e7),
    ("temperature", 1e300),
    ("temperature", "1"),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", -1),
    ("top_p", 1.5),
    ("top_k", -2),
    ("top_k", 2.5),
    ("min_p", 2),
    ("min_p", -0.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("presence_penalty", 3),
    ("frequency_penalty", -2.5),
    ("n", 0),
    ("n", 100_000),
    ("n", "2"),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 2**63),
    ("max_tokens", 1.5),
    ("min_tokens", 5),
    ("seed", "1"),
    ("seed", 2**64),
    ("stop", [""]),
    ("stop", ""),
    ("stop", [1]),
    ("stop", ["a"] * 1025),
    ("stop", {"a": 1}),
    ("stop_token_ids", [VOCAB]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [0] * 1025),
    ("stop_token_ids", list(range(1_000_000))),
    ("stop_token_ids", 3),
    ("logit_bias", {str(VOCAB): 5}),
    ("logit_bias", {"999999": 5}),
    ("logit_bias", {"a": 5}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"1": None}),
    ("logit_bias", []),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [VOCAB]),
    ("bad_words", [""]),
    ("ignore_eos", 1),
    ("skip_special_tokens", "yes"),
    ("truncate_prompt_tokens", 0),
    ("priority", "high"),
    ("priority", 2**40),
    ("cache_salt", 7),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("model", 7),
    ("response_format", {"type": "xml"}),
    ("no_such_field", 1),
    ("chat_template", "{{ 1 }}"),
]
WRONG_COMPLETION: list[tuple[str, Any]] = [
    ("prompt", None),
    ("prompt", []),
    ("prompt", [[]]),
    ("prompt", [""]),
    ("prompt", {}),
    ("prompt", [-1]),
    ("prompt", [VOCAB]),
    ("prompt", [2**62]),
    ("prompt", [1.5]),
    ("prompt", ["a"] * 100_000),
    ("prompt", [5] * CONTEXT),
    ("prompt", [5] * 10 * CONTEXT),
    ("logprobs", True),
    ("logprobs", -1),
    ("logprobs", 21),
    ("logprobs", 60_000),
    ("best_of", 3),
    ("echo", "yes"),
    ("suffix", "b"),
]
WRONG_CHAT: list[tuple[str, Any]] = [
    ("messages", None),
    ("messages", []),
    ("messages", "hello"),
    ("messages", [{"role": "user", "content": "x" * 4 * CONTEXT}]),
    ("messages[0]", [{"content": "a"}]),
    ("messages[0].content", [{"role": "user", "content": 7}]),
    ("messages[0].content", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ("messages[0].content", [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]),
    ("top_logprobs", 3),
    ("tools", [TOOL]),
    ("tools[0]", [{"type": "function"}]),
    ("tools", {}),
    ("tool_choice", "any"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("functions", [{"name": "f"}]),
    ("modalities", ["audio"]),
    ("chat_template_kwargs", []),
    ("chat_template_kwargs.messages", {"messages": []}),
    ("continue_final_message", 1),
]


def check(server: Server, path: str, body: dict[str, Any], param: str, value: Any) -> None:
    reply = server.post(path, {**body, param.split("[", maxsplit=1)[0].split(".", maxsplit=1)[0]: value})
    assert reply.status == 400, reply.text
    assert reply.error["type"] == "invalid_request_error"
    assert reply.error["param"] == param
    assert param in reply.error["message"]
    assert len(reply.error["message"]) < 500
    assert server.post(path, body).status == 200


@pytest.mark.parametrize(("param", "value"), WRONG_SAMPLING)
@pytest.mark.parametrize(("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
def test_a_wrong_sampling_field_is_refused_by_its_name(
    server: Server, path: str, body: dict[str, Any], param: str, value: Any
) -> None:
    if (path, param) == ("/v1/completions", "chat_template"):
        pytest.skip("a field of chats")
    check(server, path, body, param, value)


@pytest.mark.parametrize(("param", "value"), WRONG_COMPLETION)
def test_a_wrong_field_of_a_completion_is_refused_by_its_name(server: Server, param: str, value: Any) -> None:
    check(server, "/v1/completions", COMPLETION, param, value)


@pytest.mark.parametrize(("param", "value"), WRONG_CHAT)
def test_a_wrong_field_of_a_chat_is_refused_by_its_name(server: Server, param: str, value: Any) -> None:
    check(server, "/v1/chat/completions", CHAT, param, value)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"a"', b'{"prompt": NaN}', b"\xff", b'{"prompt": "\\ud800"}'])
def test_a_body_that_is_no_object_is_refused(server: Server, body: bytes) -> None:
    reply = server.post("/v1/completions", body)
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"


def test_deep_nesting_is_refused_and_does_no_harm(server: Server) -> None:
    deep = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert server.post("/v1/completions", deep).status == 400
    assert server.post("/v1/completions", COMPLETION).status == 200


def test_a_prompt_that_leaves_no_room_says_so_with_numbers(server: Server) -> None:
    for length, status in ((CONTEXT - 1, 200), (CONTEXT, 400), (CONTEXT + 1, 400)):
        reply = server.post("/v1/completions", {"prompt": [5] * length, "max_tokens": 100, "ignore_eos": True})
        assert reply.status == status, reply.text
    assert reply.error["code"] == "context_length_exceeded"
    assert str(CONTEXT) in reply.error["message"]
    assert str(CONTEXT + 1) in reply.error["message"]
    fits = server.post("/v1/completions", {"prompt": [5] * (CONTEXT - 3), "max_tokens": 100, "ignore_eos": True}).body
    assert fits["choices"][0]["finish_reason"] == "length"
    assert fits["usage"]["completion_tokens"] == 3


def test_nothing_left_to_draw_is_refused(server: Server) -> None:
    body = {**COMPLETION, "allowed_token_ids": [100], "logit_bias": {"100": -100}}
    assert server.post("/v1/completions", body).error["param"] == "allowed_token_ids"


def test_unknown_models_routes_and_methods_have_their_status(server: Server, client: openai.OpenAI) -> None:
    reply = server.post("/v1/completions", {**COMPLETION, "model": "gpt-9"})
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")
    reply = server.get("/v2/nothing")
    assert (reply.status, reply.error["code"]) == (404, "unknown_url")
    reply = server.get("/v1/completions")
    assert (reply.status, reply.error["code"]) == (405, "method_not_allowed")
    assert server.post("/health", {}).status == 405


def test_models_are_listed_under_all_their_names(client: openai.OpenAI, server: Server) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "also-tiny"]
    assert client.models.retrieve("also-tiny").owned_by == "octavo"
    assert server.get("/v1/models").body["data"][0]["max_model_len"] == CONTEXT
    assert server.post("/v1/completions", {**COMPLETION, "model": "also-tiny"}).body["model"] == "also-tiny"


def test_the_official_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="a", temperature=-1)
    assert caught.value.param == "temperature"


def test_unknown_fields_may_pass_with_a_warning(start: Callable[..., Server]) -> None:
    running = start("--unknown-fields", "warn")
    assert running.post("/v1/completions", {**COMPLETION, "no_such_field": 1}).status == 200
    running.wait_line("no_such_field")


def test_a_body_above_the_limit_is_refused_while_health_answers(start: Callable[..., Server]) -> None:
    running = start("--max-body-bytes", "100000")
    body = json.dumps({**COMPLETION, "prompt": "x" * 100_000}).encode()
    reply = running.post("/v1/completions", body)
    assert (reply.status, reply.error["code"]) == (413, "request_too_large")
    connection = running.connect()
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Transfer-Encoding", "chunked")
    connection.endheaders()
    for _ in range(3):
        connection.send(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
    assert connection.getresponse().status == 413
    assert running.get("/health").status == 200
    assert running.post("/v1/completions", COMPLETION).status == 200


def test_keys_open_every_route_but_the_public_ones(start: Callable[..., Server]) -> None:
    running = start("--api-key", "first", "--allowed-origin", "https://page.example", OCTAVO_API_KEY="second")
    routes = [
        ("GET", "/v1/models"),
        ("GET", "/v1/models/x"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/metrics"),
        ("GET", "/engine/state"),
        ("GET", "/openapi.json"),
        ("GET", "/nothing"),
        ("GET", "/v1/completions"),
    ]
    for method, path in routes:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "first"}, {"x-api-key": "firs"}):
            reply = running.request(method, path, COMPLETION if method == "POST" else None, headers)
            assert reply.status == 401, path
            assert reply.error["type"] == "authentication_error"
    assert running.get("/health").status == running.get("/ready").status == 200
    for key in ("first", "second"):
        assert running.post("/v1/completions", COMPLETION, headers={"Authorization": f"Bearer {key}"}).status == 200
    assert running.post("/v1/completions", COMPLETION, headers={"x-api-key": "first"}).status == 200

    origin = {"Origin": "https://page.example"}
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    preflight = running.request("OPTIONS", "/v1/completions", headers=origin | asked)
    assert preflight.status == 200
    assert preflight.headers["access-control-allow-origin"] == "https://page.example"
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    refused = running.post("/v1/completions", COMPLETION, headers=origin)
    assert refused.status == 401
    assert refused.headers["access-control-allow-origin"] == "https://page.example"
    assert "access-control-allow-origin" not in running.get("/health", headers={"Origin": "https://other"}).headers
