"""`/v1/responses`: the official client gets what it gets from a chat."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.engine.test_messages import ARGUMENTS, HERMES, HERMES_TEXT, WEATHER
from tests.server.running import Server
from tests.server.speaking import Speak

TOOL: Any = {"type": "function", **WEATHER["function"], "strict": False}
INPUT: Any = [
    {"role": "developer", "content": "be brief"},
    {"role": "user", "content": [{"type": "input_text", "text": "say a tart"}]},
]
SAME: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "say a tart"}]


def test_an_answer_is_that_of_a_chat(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model="tiny", messages=SAME, max_tokens=12, temperature=0)
    asked: dict[str, Any] = {"model": "tiny", "max_output_tokens": 12, "temperature": 0}
    for given in ({"input": INPUT}, {"input": "say a tart", "instructions": "be brief"}):
        response = client.responses.create(**asked, **given)
        assert response.output_text == chat.choices[0].message.content
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.usage is not None
        assert chat.usage is not None
        assert response.usage.input_tokens == chat.usage.prompt_tokens
        assert response.usage.output_tokens == chat.usage.completion_tokens


def test_events_are_numbered_and_make_the_same_response(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "input": INPUT, "max_output_tokens": 12, "temperature": 0}
    whole = client.responses.create(**asked)
    found = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in found] == list(range(len(found)))
    assert [found[0].type, found[1].type, found[-1].type] == [
        "response.created",
        "response.in_progress",
        "response.incomplete",
    ]
    deltas = [event.delta for event in found if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text


def test_items_are_reasoning_a_message_and_calls(speak: Speak) -> None:
    running = speak(HERMES_TEXT, HERMES, ())
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
    asked: dict[str, Any] = {
        "model": client.models.list().data[0].id,
        "input": "hi",
        "tools": [TOOL],
        "temperature": 0,
        "max_output_tokens": 500,
    }
    whole = client.responses.create(**asked)
    assert whole.status == "completed"
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    call = whole.output[2]
    assert (call.name, json.loads(call.arguments)) == ("weather", ARGUMENTS)  # type: ignore[union-attr]
    assert whole.usage is not None
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens

    items: list[Any] = []
    texts: dict[str, str] = {}
    for event in client.responses.create(**asked, stream=True):
        if event.type == "response.output_item.done":
            items.append(event.item)
        elif event.type.endswith(".delta"):
            texts[event.item_id] = texts.get(event.item_id, "") + event.delta  # type: ignore[union-attr]

    def content(item: Any) -> str:
        return item.arguments if item.type == "function_call" else item.content[0].text

    assert [content(item) for item in items] == [content(item) for item in whole.output]
    assert [texts[item.id] for item in items] == [content(item) for item in items]
    with client.responses.stream(**asked) as stream:
        final = stream.until_done().get_final_response()
    assert [content(item) for item in final.output] == [content(item) for item in whole.output]
    # What came can be sent back, with the results of the calls.
    history = [{"role": "user", "content": "hi"}, *(item.model_dump(exclude_none=True) for item in whole.output)]
    history += [{"type": "function_call_output", "call_id": item.call_id, "output": "1"} for item in items[2:]]
    assert client.responses.create(**{**asked, "input": history}).status == "completed"


def test_log_probabilities_are_those_of_a_chat_whole_and_in_deltas(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="tiny", messages=SAME, max_tokens=12, temperature=0, logprobs=True, top_logprobs=3
    )
    assert chat.choices[0].logprobs is not None
    expected = [position.model_dump() for position in chat.choices[0].logprobs.content or []]
    assert len(expected) == 12
    asked: dict[str, Any] = {
        "model": "tiny",
        "input": INPUT,
        "max_output_tokens": 12,
        "temperature": 0,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 3,
    }

    def scores(entries: Any) -> list[Any]:
        return [entry.model_dump() for entry in entries]

    (message,) = client.responses.create(**asked).output
    assert scores(message.content[0].logprobs) == expected  # type: ignore[union-attr]
    told: list[Any] = []
    for event in client.responses.create(**asked, stream=True):
        if event.type == "response.output_text.delta":
            told += event.logprobs
        elif event.type == "response.output_text.done":
            assert [entry.token for entry in event.logprobs] == [entry["token"] for entry in expected]
    assert [(entry.token, entry.logprob) for entry in told] == [(one["token"], one["logprob"]) for one in expected]


def test_scores_of_reasoning_and_calls_are_no_part_of_the_text(speak: Speak) -> None:
    running = speak(HERMES_TEXT, HERMES, ())
    body = {
        "input": "hi",
        "tools": [TOOL],
        "temperature": 0,
        "max_output_tokens": 500,
        "include": ["message.output_text.logprobs"],
    }
    (message,) = [item for item in running.post("/v1/responses", body).body["output"] if item["type"] == "message"]
    (part,) = message["content"]
    text = b"".join(bytes(entry["bytes"]) for entry in part["logprobs"]).decode(errors="replace")
    assert part["text"].strip() in text
    assert len(text) < len(part["text"]) + 40, "nor is what marks them, but for what shares a token with the text"


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("input", None),
        ("input", []),
        ("input[0]", [{"type": "item_reference", "id": "x"}]),
        ("input[0].content", [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
        ("max_tokens", 5),
        ("previous_response_id", "resp_1"),
        ("background", True),
        ("truncation", "auto"),
        ("text.format", {"format": {"type": "xml"}}),
        ("include", ["reasoning.encrypted_content"]),
        ("top_logprobs", 2),
        ("tools[0]", [{"type": "web_search"}]),
        ("tool_choice", "any"),
        ("temperature", -1),
        ("no_such_field", 1),
    ],
)
def test_a_wrong_field_is_refused_by_its_name(server: Server, param: str, value: Any) -> None:
    name = param.split("[", maxsplit=1)[0].split(".", maxsplit=1)[0]
    reply = server.post("/v1/responses", {"input": "a", "max_output_tokens": 2, name: value})
    assert reply.status == 400, reply.text
    assert reply.error["param"] == param
