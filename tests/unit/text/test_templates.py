"""Chat templates against Jinja2 itself, set up as transformers sets it up."""

from __future__ import annotations

import json
import re
from typing import Any

import jinja2
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from template_sources import SOURCES
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from octavo import _core

SPECIAL = ["<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "[INST]"]


class RefusalError(Exception):
    """What a template raises."""


def environment() -> ImmutableSandboxedEnvironment:
    def raise_exception(message: str) -> None:
        raise RefusalError(message)

    def tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    found = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    found.filters["tojson"] = tojson
    found.globals["raise_exception"] = raise_exception
    return found


ORACLES = {name: environment().from_string(source) for name, source in SOURCES.items()}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> _core.Tokenizer:
    """Every byte, and the special tokens of the templates."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    whole = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.decoder = decoders.ByteLevel()
    whole.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    folder = tmp_path_factory.mktemp("templates")
    whole.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))
    return _core.Tokenizer.from_dir(folder)


@pytest.fixture(scope="module")
def templates(tokenizer) -> dict[str, _core.ChatTemplate]:
    return {name: _core.ChatTemplate(source, tokenizer) for name, source in SOURCES.items()}


def normalized(messages: list[dict[str, Any]], source: str) -> list[dict[str, Any]]:
    """Forms that mean the same, evened out: absent content is empty, parts are text for templates without parts."""
    structured = "['type']" in source
    found = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and not structured:
            content = "\n".join(part["text"] for part in content)
        found.append({**message, "content": content if content is not None else ""})
    return found


def check(name: str, template, tokenizer, messages, tools, generate, kwargs) -> None:
    variables = {"bos_token": "<bos>", "eos_token": "<eos>", "tools": tools, "documents": None, **kwargs}
    given_messages = normalized(messages, SOURCES[name])
    arguments = (json.dumps(messages), json.dumps(tools) if tools else None, generate, False, json.dumps(kwargs))
    refusal = None
    try:
        expected = ORACLES[name].render(messages=given_messages, add_generation_prompt=generate, **variables)
    except RefusalError as error:
        refusal = f"messages: the chat template refuses them: {error}"
    except (jinja2.TemplateError, TypeError):
        refusal = "messages: the chat template cannot render them"
    if refusal is not None:
        with pytest.raises(_core.TemplateError, match=re.escape(refusal)):
            template.render(tokenizer, *arguments)
        return
    text, ids = template.render(tokenizer, *arguments)
    assert text == expected
    assert tokenizer.decode(ids, False) == text
    bos = tokenizer.token_to_id("<bos>")
    user_text = json.dumps(messages, ensure_ascii=False)
    assert ids.count(bos) == ("bos_token" in SOURCES[name])
    assert "<bos>" in user_text or text.count("<bos>") == ids.count(bos)


def tool(name: str) -> dict[str, Any]:
    properties = {"city": {"type": "string", "description": "Größe “x” & <y>"}, "n": {"type": "number", "default": 1.5}}
    parameters = {"type": "object", "properties": properties, "required": ["city"]}
    return {"type": "function", "function": {"name": name, "description": "Does it.", "parameters": parameters}}


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": "abc123def", "type": "function", "function": {"name": name, "arguments": arguments}}


SYSTEM = {"role": "system", "content": "Be brief. <bos>"}
USER = {"role": "user", "content": " Hi 👋 <|im_end|>\n "}
ANSWER = {"role": "assistant", "content": "\n<think>\nwhy\n</think>\n\nHello."}
PARTS = {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]}
CALL = {"role": "assistant", "content": None, "tool_calls": [call("get", {"city": "Ōsaka", "n": [1, 2.0, None, True]})]}
TWO_CALLS = {
    "role": "assistant",
    "content": "Ok.",
    "tool_calls": [call("get", {}), call("now", {"a": {"b": "<c>'\""}})],
}
RESULT = {"role": "tool", "content": '{"temp": 21}', "tool_call_id": "abc123def"}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [USER],
    "system": [SYSTEM, USER],
    "three turns": [SYSTEM, USER, ANSWER, USER],
    "ends with the assistant": [USER, ANSWER],
    "parts": [SYSTEM, PARTS, ANSWER, PARTS],
    "tool call": [USER, CALL, RESULT],
    "tool call and answer": [SYSTEM, USER, CALL, RESULT, ANSWER, USER],
    "two calls": [USER, TWO_CALLS, RESULT, RESULT, ANSWER],
    "empty": [{"role": "user", "content": ""}, {"role": "assistant", "content": None}, USER],
    "two users": [USER, USER],
    "unknown role": [{"role": "critic", "content": "x"}],
}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_prompts_equal_those_of_jinja(templates, tokenizer, name, conversation) -> None:
    for tools in (None, [tool("get")], [tool("get"), tool("now")]):
        for generate in (False, True):
            for kwargs in ({}, {"enable_thinking": False}):
                check(name, templates[name], tokenizer, CONVERSATIONS[conversation], tools, generate, kwargs)


TEXT = st.text(
    st.one_of(st.sampled_from(" \n\t<|>[]{}%'\"\\/éſ😀"), st.characters(exclude_categories=["Cs"])), max_size=20
)
SPLICED = st.one_of(TEXT, st.builds(lambda a, b, c: a + b + c, TEXT, st.sampled_from([*SPECIAL, "</think>"]), TEXT))
JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(2**53), 2**53), st.floats(allow_nan=False, allow_infinity=False), TEXT
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=6,
)
CALLS = st.lists(
    st.builds(call, st.text("abc_", min_size=1), st.dictionaries(TEXT, JSON, max_size=3)), min_size=1, max_size=2
)
MESSAGE = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": SPLICED}),
    st.fixed_dictionaries({"role": st.just("assistant"), "content": st.none() | SPLICED, "tool_calls": CALLS}),
    st.fixed_dictionaries({"role": st.just("tool"), "content": SPLICED, "tool_call_id": st.just("abc123def")}),
    st.fixed_dictionaries(
        {
            "role": st.just("user"),
            "content": st.lists(
                st.fixed_dictionaries({"type": st.just("text"), "text": SPLICED}), min_size=1, max_size=3
            ),
        }
    ),
)


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(list(SOURCES)),
    messages=st.lists(MESSAGE, min_size=1, max_size=5),
    tools=st.none() | st.lists(st.builds(tool, st.text("abc", min_size=1)), min_size=1, max_size=2),
    generate=st.booleans(),
)
@example(name="ChatML", messages=[{"role": "user", "content": "\x1f a\x1c\x85"}], tools=None, generate=False)
def test_prompts_of_any_messages_equal_those_of_jinja(templates, tokenizer, name, messages, tools, generate) -> None:
    check(name, templates[name], tokenizer, messages, tools, generate, {})
