"""`/v1/messages`: Anthropic's own client gets what OpenAI's gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest

from tests.engine.test_messages import ARGUMENTS, HERMES, HERMES_TEXT, WEATHER
from tests.server.running import Server
from tests.server.speaking import Speak

USER: list[Any] = [{"role": "user", "content": "say a tart"}]
GREEDY = {"temperature": 0}
"""The client has no argument for it."""
TOOL: Any = {"name": "weather", "input_schema": WEATHER["function"]["parameters"]}


@pytest.fixture(scope="module")
def asked(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def test_an_answer_is_that_of_a_chat(asked: anthropic.Anthropic, client: openai.OpenAI) -> None:
    message = asked.messages.create(model="tiny", max_tokens=12, messages=USER, system="be brief", extra_body=GREEDY)
    same: list[Any] = [{"role": "system", "content": "be brief"}, *USER]
    chat = client.chat.completions.create(model="tiny", max_tokens=12, messages=same, temperature=0)
    assert [block.type for block in message.content] == ["text"]
    assert message.content[0].text == chat.choices[0].message.content  # type: ignore[union-attr]
    assert message.stop_reason == "max_tokens"
    assert chat.usage is not None
    told = message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    assert (told, message.usage.output_tokens) == (chat.usage.prompt_tokens, chat.usage.completion_tokens)
    counted = asked.messages.count_tokens(model="tiny", messages=USER, system="be brief")
    assert counted.input_tokens == chat.usage.prompt_tokens


def test_streamed_events_make_the_same_message(asked: anthropic.Anthropic) -> None:
    arguments: dict[str, Any] = {"model": "tiny", "max_tokens": 40, "messages": USER, "extra_body": GREEDY}
    whole = asked.messages.create(**arguments)
    with asked.messages.stream(**arguments) as stream:
        final = stream.get_final_message()
    assert [block.text for block in final.content] == [block.text for block in whole.content]  # type: ignore[union-attr]
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    text: str = whole.content[0].text  # type: ignore[union-attr]
    stopped = asked.messages.create(**arguments, stop_sequences=[text[8:10]])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[8:10])


def test_blocks_are_reasoning_text_and_calls(speak: Speak) -> None:
    running = speak(HERMES_TEXT, HERMES, ())
    asked = anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0)
    name = running.get("/v1/models").body["data"][0]["id"]
    arguments: dict[str, Any] = {
        "model": name,
        "max_tokens": 500,
        "messages": USER,
        "tools": [TOOL],
        "extra_body": GREEDY,
    }
    whole = asked.messages.create(**arguments)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    call = whole.content[2]
    assert (call.name, call.input) == ("weather", ARGUMENTS)  # type: ignore[union-attr]
    assert whole.stop_reason == "tool_use"
    with asked.messages.stream(**arguments) as stream:
        final = stream.get_final_message()

    def without_ids(blocks: list[Any]) -> list[dict[str, Any]]:
        return [{k: v for k, v in block.model_dump(exclude_none=True).items() if k != "id"} for block in blocks]

    assert without_ids(list(final.content)) == without_ids(list(whole.content))
    one = asked.messages.create(**arguments, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in one.content].count("tool_use") == 1


@pytest.mark.parametrize(
    ("change", "status", "kind"),
    [
        ({"temperature": -1}, 400, "invalid_request_error"),
        ({"max_tokens": None}, 400, "invalid_request_error"),
        ({"max_tokens": 0}, 400, "invalid_request_error"),
        ({"messages": []}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400, "invalid_request_error"),
        ({"tool_choice": {"type": "required"}}, 400, "invalid_request_error"),
        ({"no_such_field": 1}, 400, "invalid_request_error"),
        ({"n": 2}, 400, "invalid_request_error"),
        ({"stop": ["a"]}, 400, "invalid_request_error"),
        ({"model": "claude"}, 404, "not_found_error"),
    ],
)
def test_errors_have_the_form_of_the_protocol(server: Server, change: dict[str, Any], status: int, kind: str) -> None:
    reply = server.post("/v1/messages", {"model": "tiny", "max_tokens": 4, "messages": USER, **change})
    assert reply.status == status, reply.text
    assert reply.body["type"] == "error"
    assert reply.body["error"]["type"] == kind
    assert reply.headers["content-type"] == "application/json"


def test_the_client_raises_its_own_errors(asked: anthropic.Anthropic, start: Callable[..., Server]) -> None:
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        asked.messages.create(model="tiny", max_tokens=4, messages=USER, extra_body={"temperature": -1})
    closed = start("--api-key", "secret")
    name = closed.get("/v1/models", headers={"x-api-key": "secret"}).body["data"][0]["id"]
    arguments: dict[str, Any] = {"model": name, "max_tokens": 4, "messages": USER}
    opened = anthropic.Anthropic(base_url=closed.url, api_key="secret", max_retries=0)
    assert opened.messages.create(**arguments).stop_reason == "max_tokens"
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=closed.url, api_key="wrong", max_retries=0).messages.create(**arguments)
