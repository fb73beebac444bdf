"""Forms and forced calls through the server: every field that asks for one, by the official clients too."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import openai
import pytest

from tests.engine.conftest import make_tiny_model
from tests.engine.test_messages import CODER, HARMONY, HERMES, LLAMA, MISTRAL, WEATHER
from tests.server.conftest import EXACT, TEMPLATE
from tests.server.running import Server

USER: list[Any] = [{"role": "user", "content": "say a tart"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
CITY = {
    "type": "function",
    "function": {
        "name": "city.now",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Köln", "Bonn"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
NAMED = {"type": "function", "function": {"name": "city.now"}}
DRAWN = {"seed": 5, "temperature": 1.2, "max_tokens": 200}


def fits(text: str) -> bool:
    return bool(jsonschema.Draft202012Validator(SCHEMA).is_valid(json.loads(text)))


@pytest.mark.parametrize(
    ("fields", "judge"),
    [
        ({"response_format": FORMAT}, fits),
        ({"structured_outputs": {"json": SCHEMA}}, fits),
        ({"guided_json": SCHEMA}, fits),
        ({"guided_json": json.dumps(SCHEMA)}, fits),
        ({"structured_outputs": {"regex": r"[0-9]{3}-[ab]{2}"}}, lambda text: re.fullmatch(r"[0-9]{3}-[ab]{2}", text)),
        ({"guided_regex": r"^[0-9]{3}-[ab]{2}$"}, lambda text: re.fullmatch(r"[0-9]{3}-[ab]{2}", text)),
        ({"structured_outputs": {"choice": ["red", "green"]}}, lambda text: text in ("red", "green")),
        ({"guided_choice": ["red", "green"]}, lambda text: text in ("red", "green")),
        ({"structured_outputs": {"grammar": 'start: "a" /[bc]{2}/'}}, lambda text: re.fullmatch("a[bc]{2}", text)),
        ({"guided_grammar": 'start: "a" /[bc]{2}/'}, lambda text: re.fullmatch("a[bc]{2}", text)),
        ({"response_format": {"type": "text"}}, lambda _: True),
    ],
)
def test_every_field_that_asks_for_a_form_gets_it(
    server: Server, fields: dict[str, Any], judge: Callable[[str], Any]
) -> None:
    chat = server.post("/v1/chat/completions", {"messages": USER, **DRAWN, **fields})
    assert chat.status == 200, chat.text
    (choice,) = chat.body["choices"]
    text = choice["message"]["content"]
    assert choice["finish_reason"] == "stop" or fields["response_format"] == {"type": "text"}
    assert judge(text), text
    events = list(server.stream("/v1/chat/completions", {"messages": USER, **DRAWN, **fields}))
    assert "".join(e["choices"][0]["delta"].get("content") or "" for e in events) == text
    completion = server.post("/v1/completions", {"prompt": ["tart", "a"], **DRAWN, **fields})
    assert completion.status == 200, completion.text
    assert all(judge(choice["text"]) for choice in completion.body["choices"])


def test_the_official_clients_parse_what_they_asked_for(client: openai.OpenAI, server: Server) -> None:
    chat = client.chat.completions.create(model="tiny", messages=USER, response_format=FORMAT, **DRAWN)  # type: ignore[call-overload]
    assert fits(chat.choices[0].message.content)
    response = client.responses.create(
        model="tiny",
        input="say a tart",
        temperature=1.2,
        max_output_tokens=200,
        text={"format": {"type": "json_schema", "name": "person", "schema": SCHEMA, "strict": True}},
    )
    assert fits(response.output_text)
    anything = client.responses.create(
        model="tiny", input="x", max_output_tokens=60, text={"format": {"type": "json_object"}}
    )
    assert anything.output_text.startswith("{")
    asked = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    message = asked.messages.create(
        model="tiny", max_tokens=200, messages=USER, extra_body={"structured_outputs": {"choice": ["red", "green"]}}
    )
    assert message.content[0].text in ("red", "green")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.name"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "x"}}}},
            "response_format",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {"json": ""}}, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a" * 300_000}}, "structured_outputs.regex"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_grammar": "start: missing"}, "guided_grammar"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice"),
        ({"guided_choice": ["a"], "ignore_eos": True}, "ignore_eos"),
        ({"guided_choice": ["a"], "min_tokens": 3}, "min_tokens"),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_name_and_the_next_request_works(
    server: Server, fields: dict[str, Any], param: str
) -> None:
    for path, body in (("/v1/chat/completions", {"messages": USER}), ("/v1/completions", {"prompt": "a"})):
        for stream in (False, True):
            reply = server.post(path, {**body, "max_tokens": 8, "stream": stream, **fields})
            assert reply.status == 400, reply.text
            assert reply.error["param"] == param, reply.text
    assert server.post("/v1/completions", {"prompt": "a", "guided_choice": ["red"]}).body["choices"][0]["text"] == "red"


def test_hostile_grammars_do_not_stop_the_other_requests(server: Server) -> None:
    hostile = [{"guided_regex": f"((a{{0,{size}}}){{0,{size}}}b?){{0,{size}}}"} for size in range(100, 140)] + [
        {"guided_json": {"type": "array", "minItems": 10**6 + i}} for i in range(10)
    ]

    def ask(fields: dict[str, Any]) -> int:
        return server.post("/v1/completions", {"prompt": "a", "max_tokens": 2, **fields}).status

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, fields) for fields in hostile]
        for _ in range(20):
            assert server.get("/health").status == 200
            assert ask({}) == 200
        assert {one.result() for one in asked} <= {200, 400, 429}
    assert ask({"guided_choice": ["red"]}) == 200


# -- forced calls ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["hermes", "llama", "mistral", "harmony"])
def caller(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a model that would never call by itself, in one of the formats."""
    template = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL, "harmony": HARMONY}[request.param]
    yield from serve(tmp_path_factory.mktemp(request.param), template)


def serve(folder: Path, template: str) -> Iterator[Server]:
    make_tiny_model(folder)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": template}))
    running = Server.start(str(folder), *EXACT)
    yield running
    running.stop()


def calls_of(server: Server, stream: bool, **fields: Any) -> tuple[list[tuple[str, Any]], str, str | None]:
    """Names and arguments, the finish reason, and the content."""
    body = {"messages": USER, "tools": [CITY, NOW], **DRAWN, **fields}
    if not stream:
        reply = server.post("/v1/chat/completions", body)
        assert reply.status == 200, reply.text
        (choice,) = reply.body["choices"]
        told = [call["function"] for call in choice["message"].get("tool_calls", [])]
        return [(c["name"], c["arguments"]) for c in told], choice["finish_reason"], choice["message"]["content"]
    calls: list[list[str]] = []
    finish, content = "", None
    for event in server.stream("/v1/chat/completions", body):
        (choice,) = event["choices"]
        content = (content or "") + (choice["delta"].get("content") or "")
        for call in choice["delta"].get("tool_calls", []):
            if "id" in call:
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
        finish = choice["finish_reason"] or finish
    return [(name, arguments) for name, arguments in calls], finish, content


@pytest.mark.parametrize("stream", [False, True])
def test_forced_calls_are_of_the_schema_and_finish_as_they_should(caller: Server, stream: bool) -> None:
    for seed in range(3):
        one = {"seed": seed, "parallel_tool_calls": False}
        calls, finish, content = calls_of(caller, stream, tool_choice="required", **one)
        assert finish in {"tool_calls", "length"}
        named, stop, _ = calls_of(caller, stream, tool_choice=NAMED, **one)
        if finish == "tool_calls":
            assert len(calls) == 1
            assert not content
            check(calls[0])
        if stop == "stop":
            assert [name for name, _ in named] == ["city.now"]
            check(named[0])
        else:
            assert stop == "length"


def check(call: tuple[str, str]) -> None:
    name, arguments = call
    schema = CITY["function"]["parameters"] if name == "city.now" else {"type": "object", "maxProperties": 0}  # type: ignore[index]
    jsonschema.validate(json.loads(arguments), schema)


def test_only_allowed_tools_are_called(caller: Server) -> None:
    only = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]},
    }
    calls, _, _ = calls_of(caller, False, tool_choice=only, parallel_tool_calls=False)
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("now", {})]


def test_the_other_protocols_force_calls_too(caller: Server) -> None:
    asked = anthropic.Anthropic(base_url=caller.url, api_key="none", max_retries=0)
    tools: Any = [
        {
            "name": t["function"]["name"],
            "input_schema": t["function"].get("parameters", {"type": "object", "maxProperties": 0}),
        }
        for t in (CITY,)
    ]  # type: ignore[index, union-attr]
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "city.now"}):
        message = asked.messages.create(
            model=caller.get("/v1/models").body["data"][0]["id"],
            max_tokens=200,
            messages=USER,
            tools=tools,
            tool_choice=choice,  # type: ignore[arg-type]
        )
        if message.stop_reason == "tool_use":
            (block,) = message.content
            assert block.type == "tool_use"
            jsonschema.validate(block.input, CITY["function"]["parameters"])  # type: ignore[index]
        else:
            assert message.stop_reason == "max_tokens"
    body = {
        "input": "x",
        "max_output_tokens": 200,
        "tools": [{"type": "function", **CITY["function"]}],  # type: ignore[dict-item]
        "tool_choice": {"type": "function", "name": "city.now"},
    }
    reply = caller.post("/v1/responses", body)
    assert reply.status == 200, reply.text
    if reply.body["status"] == "completed":
        assert [item["name"] for item in reply.body["output"] if item["type"] == "function_call"] == ["city.now"]


@pytest.mark.parametrize(
    "choice",
    ["any", {"type": "function"}, {"type": "function", "function": {"name": "none"}}, {"type": "allowed_tools"}, 3],
)
def test_a_choice_of_no_tool_is_refused(caller: Server, choice: Any) -> None:
    reply = caller.post("/v1/chat/completions", {"messages": USER, "tools": [CITY], "tool_choice": choice})
    assert (reply.status, reply.error["param"]) == (400, "tool_choice")
    reply = caller.post("/v1/chat/completions", {"messages": USER, "tool_choice": "required"})
    assert (reply.status, reply.error["param"]) == (400, "tool_choice")


def test_calls_in_a_format_that_is_no_grammar_cannot_be_forced(tmp_path: Path) -> None:
    for running in serve(tmp_path, CODER):
        body = {"messages": USER, "tools": [WEATHER], "tool_choice": "required"}
        reply = running.post("/v1/chat/completions", body)
        assert (reply.status, reply.error["param"]) == (400, "tool_choice")


def test_reasoning_comes_before_the_form_and_is_free(tmp_path: Path) -> None:
    for running in serve(tmp_path, "{% if false %}</think>{% endif %}" + TEMPLATE + "<think>"):
        body = {"messages": USER, "max_tokens": 400, "guided_choice": ["red", "green"], "temperature": 1.5}
        for seed in range(6):
            reply = running.post("/v1/chat/completions", {**body, "seed": seed, "logit_bias": {"63": 9, "50": 6}})
            (choice,) = reply.body["choices"]
            if choice["finish_reason"] == "stop":
                assert choice["message"]["content"] in ("red", "green")
            assert "</think>" not in (choice["message"].get("content") or "")


def test_a_constrained_stream_goes_on_when_the_engine_is_killed(start: Callable[..., Server]) -> None:
    running = start("--max-num-seqs", "8")
    bodies = [
        {"prompt": f"tart {i}", "max_tokens": 150, "seed": i, "guided_regex": "([a-z]{2}-){40}", "stream": True}
        for i in range(8)
    ]

    def ask(body: dict[str, Any]) -> str:
        return "".join(event["choices"][0]["text"] for event in running.stream("/v1/completions", body))

    with ThreadPoolExecutor(8) as pool:
        undisturbed = list(pool.map(ask, bodies))
        assert all(re.fullmatch("([a-z]{2}-){40}", text) for text in undisturbed)
        again = [pool.submit(ask, body) for body in bodies]
        os.kill(running.engine_pid(), signal.SIGKILL)
        running.wait_count("starting it again", 1)
        assert [one.result() for one in again] == undisturbed


def test_a_real_model_writes_json_that_parses(smollm2_path: Path) -> None:
    running = Server.start(str(smollm2_path), "--port", "0", "--disable-log-stats", "--max-model-len", "1024")
    try:
        for body in (
            {
                "response_format": FORMAT,
                "messages": [{"role": "user", "content": "Describe Ada Lovelace as JSON with name and age."}],
            },
            {
                "response_format": {"type": "json_object"},
                "messages": [{"role": "user", "content": "Give me a JSON object with a colour."}],
            },
        ):
            reply = running.post("/v1/chat/completions", {**body, "temperature": 0, "max_tokens": 300})
            assert reply.status == 200, reply.text
            (choice,) = reply.body["choices"]
            if choice["finish_reason"] == "stop":
                assert isinstance(json.loads(choice["message"]["content"]), dict)
        assert fits(
            running.post(
                "/v1/chat/completions",
                {"response_format": FORMAT, "temperature": 0, "messages": USER, "max_tokens": 200},
            ).body["choices"][0]["message"]["content"]
        )
    finally:
        running.stop()
