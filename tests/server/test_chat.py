"""`/v1/chat/completions`, `/tokenize` and `/detokenize`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from octavo import LLM
from octavo.batch.bodies import parse_chat_body
from octavo.batch.replies import chat_reply
from tests.engine.conftest import make_tiny_model
from tests.engine.test_messages import (
    ARGUMENTS,
    CODER,
    CODER_TEXT,
    HARMONY,
    HARMONY_TEXT,
    HERMES,
    HERMES_TEXT,
    LLAMA,
    LLAMA_TEXT,
    MISTRAL,
    MISTRAL_TEXT,
    WEATHER,
)
from tests.server.conftest import EXACT
from tests.server.running import Server
from tests.server.speaking import Speak

USER = [{"role": "user", "content": "say a tart"}]
HISTORY = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {"role": "assistant", "content": None},
    {"role": "user", "content": "<eos>é😀"},
]


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    engine = LLM(str(model), backend="reference", dtype="float32", disable_log_stats=True)
    yield engine
    engine.shutdown()


def expected(llm: LLM, body: dict[str, Any]) -> dict[str, Any]:
    """What the batch writer replies to the body: another implementation of the protocol over the same engine."""
    parsed = parse_chat_body(body, llm.engine.default_sampling_params(chat=True))
    prompt = llm.engine.render_chat(parsed.messages, **parsed.template)
    with llm.engine.submit([llm.engine.submission(prompt, parsed.params)]) as batch:
        (output,) = batch.collect(lambda _: None)
    return chat_reply("x", "tiny", output, parsed.params.logprobs or 0, parallel_tool_calls=parsed.parallel_tool_calls)


def comparable(reply: dict[str, Any]) -> dict[str, Any]:
    choices = [{k: v for k, v in choice.items() if k != "stop_reason"} for choice in reply["choices"]]
    usage = {k: v for k, v in reply["usage"].items() if k != "prompt_tokens_details"}
    return {"object": reply["object"], "model": reply["model"], "choices": choices, "usage": usage}


BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 12},
    "the newer name of max_tokens": {"seed": 1, "max_completion_tokens": 7, "max_tokens": 20},
    "the rest of the context": {"seed": 2, "ignore_eos": True},
    "choices with log-probabilities": {"seed": 3, "n": 3, "logprobs": True, "top_logprobs": 4, "max_tokens": 10},
    "log-probabilities of the drawn alone": {"seed": 3, "logprobs": True, "temperature": 2, "max_tokens": 10},
    "a stop string": {"seed": 4, "stop": ["e", "A"], "max_tokens": 64},
    "a history": {"messages": HISTORY, "seed": 5, "max_tokens": 9},
    "a message to go on with": {
        "messages": [*USER, {"role": "assistant", "content": "the tar"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
        "seed": 6,
        "max_tokens": 9,
    },
    "the model's end": {"seed": 7, "logit_bias": {"1": 100}},
}


@pytest.mark.parametrize("name", BODIES)
def test_a_reply_is_what_the_engine_gives_in_this_process(name: str, server: Server, llm: LLM) -> None:
    body = {"model": "tiny", "messages": USER, **BODIES[name]}
    reply = server.post("/v1/chat/completions", body)
    assert reply.status == 200, reply.text
    assert comparable(reply.body) == comparable(expected(llm, body))


@pytest.mark.parametrize("name", BODIES)
def test_events_are_a_role_then_one_for_each_token_then_the_reason(name: str, server: Server) -> None:
    body = {"messages": USER, "return_token_ids": True, **BODIES[name]}
    whole = server.post("/v1/chat/completions", {"seed": 0, **body}).body
    asked = {"seed": 0, **body, "stream_options": {"include_usage": True}}
    *chunks, last = server.stream("/v1/chat/completions", asked)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert all(chunk["object"] == "chat.completion.chunk" and chunk["usage"] is None for chunk in chunks)
    for choice in whole["choices"]:
        first, *tokens, end = (c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"])
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert len(tokens) == len(choice["token_ids"])
        assert [token for part in tokens for token in part["token_ids"]] == choice["token_ids"]
        assert all(part["finish_reason"] is None for part in (first, *tokens))
        assert end["finish_reason"] == choice["finish_reason"]
        assert "".join(p["delta"].get("content") or "" for p in (*tokens, end)) == choice["message"]["content"]
        if choice["logprobs"] is not None:
            assert [x for part in tokens for x in part["logprobs"]["content"]] == choice["logprobs"]["content"]


def test_bytes_of_tokens_make_the_text_though_tokens_are_parts_of_characters(server: Server) -> None:
    emoji = "😀".encode()
    # A byte is a token, but for its place in the alphabet; /tokenize knows it.
    ids = server.post("/tokenize", {"prompt": "😀", "add_special_tokens": False}).body["tokens"]
    assert len(ids) == len(emoji)
    body = {"messages": USER, "allowed_token_ids": ids, "max_tokens": 16, "seed": 1, "logprobs": True}
    choice = server.post("/v1/chat/completions", body).body["choices"][0]
    data = b"".join(bytes(token["bytes"]) for token in choice["logprobs"]["content"])
    assert data.decode("utf-8", "replace") == choice["message"]["content"]


def test_texts_go_to_tokens_and_back(server: Server, llm: LLM) -> None:
    tokenizer = llm.engine.require_tokenizer()
    text = "a tart <eos> é😀"
    found = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).body
    assert found["tokens"] == tokenizer.encode(text, True, True)
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 512
    assert server.post("/detokenize", {"tokens": found["tokens"]}).body == {"prompt": text}
    chat = server.post("/tokenize", {"messages": HISTORY}).body["tokens"]
    assert chat == llm.engine.render_chat(HISTORY).token_ids
    assert server.post("/tokenize", {"messages": []}).error["param"] == "messages"
    assert server.post("/tokenize", {"prompt": 3}).error["param"] == "prompt"
    assert server.post("/detokenize", {"tokens": [320]}).error["param"] == "tokens"
    assert server.post("/detokenize", {}).error["param"] == "tokens"


def test_a_template_that_refuses_says_why_and_a_base_model_gives_advice(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    running = Server.start(str(folder), *EXACT)
    try:
        reply = running.post("/v1/chat/completions", {"messages": USER})
        assert reply.status == 400
        assert "/v1/completions" in reply.error["message"]
        assert running.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status == 200
    finally:
        running.stop()
    refusing = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}{% endfor %}x"
    running = Server.start(str(folder), *EXACT, "--chat-template", refusing)
    try:
        reply = running.post("/v1/chat/completions", {"messages": HISTORY})
        assert reply.status == 400
        assert reply.error["param"] == "messages"
        assert "no system here" in reply.error["message"]
        assert running.post("/v1/chat/completions", {"messages": USER, "max_tokens": 1}).status == 200
    finally:
        running.stop()


SPEAKERS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "hermes": (HERMES_TEXT, HERMES, ()),
    "hermes with special markers": (HERMES_TEXT, HERMES, ("</think>",)),
    "qwen3_coder": (CODER_TEXT, CODER, ()),
    "llama": (LLAMA_TEXT, LLAMA, ("<|python_tag|>",)),
    "mistral": (MISTRAL_TEXT, MISTRAL, ("[TOOL_CALLS]",)),
    "harmony": (HARMONY_TEXT, HARMONY, ()),
}


@pytest.mark.parametrize("name", SPEAKERS)
def test_calls_and_reasoning_come_apart_from_the_content(name: str, speak: Speak) -> None:
    client = openai.OpenAI(base_url=f"{speak(*SPEAKERS[name]).url}/v1", api_key="none", max_retries=0)
    arguments: dict[str, Any] = {
        "model": client.models.list().data[0].id,
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [WEATHER],
        "temperature": 0,
        "max_tokens": 500,
    }
    (choice,) = client.chat.completions.create(**arguments).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    call = choice.message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", ARGUMENTS)
    whole = choice.message.model_dump()
    assert ("think" in SPEAKERS[name][0]) == (whole.get("reasoning_content") is not None) or name == "harmony"

    with client.chat.completions.stream(**arguments) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert (final.message.content or "") == (choice.message.content or "")
    assert final.message.tool_calls is not None
    streamed = [(call.function.name, call.function.arguments) for call in final.message.tool_calls]
    assert streamed == [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
    ids = [call.id for call in choice.message.tool_calls]
    assert len(set(ids)) == len(ids)

    one = client.chat.completions.create(**arguments, parallel_tool_calls=False).choices[0]
    assert one.message.tool_calls is not None
    assert len(one.message.tool_calls) == 1
    if name != "harmony":  # its calls are part of the reasoning's format
        untold = client.chat.completions.create(**arguments, tool_choice="none").choices[0]
        assert untold.finish_reason == "stop"
        assert untold.message.tool_calls is None
    cut = client.chat.completions.create(**{**arguments, "max_tokens": 4}).choices[0]
    assert cut.finish_reason == "length"
