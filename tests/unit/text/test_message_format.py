"""Texts of models become messages: whole, and delta by delta in any cut."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import ParameterError
from octavo.message_format import AnswerFormat, ChatFormat, check_parsers
from octavo.outputs import ChatMessage

HERMES = AnswerFormat("hermes", "qwen3", False, None, ())
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 3}}\n</tool_call>'
TEXT = f"<think>\nIt rains, 日本.\n</think>\n\nI look.\n{CALL}\n{CALL}"


def read(answer: AnswerFormat, pieces: list[str]) -> ChatMessage:
    message, reader = ChatMessage(), answer.reader()
    for piece in pieces:
        for delta in reader.push(piece):
            message.add(delta)
    for delta in reader.finish():
        message.add(delta)
    return message


@given(st.lists(st.integers(0, len(TEXT)), max_size=12))
def test_any_cut_of_a_text_gives_its_message(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(TEXT)]
    message = read(HERMES, [TEXT[a:b] for a, b in itertools.pairwise(places)])
    assert message.reasoning_content is not None
    assert message.reasoning_content.strip() == "It rains, 日本."
    assert message.content.strip() == "I look."
    assert [call.name for call in message.tool_calls] == ["weather"] * 2
    assert [json.loads(call.arguments) for call in message.tool_calls] == [{"city": "Köln", "days": 3}] * 2
    assert len({call.id for call in message.tool_calls}) == 2
    assert message.to_dict()["tool_calls"][1]["function"]["name"] == "weather"


def test_without_parsers_all_is_content() -> None:
    message = read(AnswerFormat(None, None, False, None, ()), [TEXT])
    assert message == ChatMessage(content=TEXT)
    assert message.to_dict() == {"role": "assistant", "content": TEXT}


def test_the_template_names_the_parsers_and_the_argument_wins() -> None:
    template = "{% if tools %}<tool_call>{{ tools }}</tool_call>{% endif %}{% if enable_thinking %}<think>{% endif %}"
    found = ChatFormat(template)
    assert found.tool_parser == "hermes"
    assert found.thinking is not None
    assert found.thinking.name == "enable_thinking"
    assert ChatFormat(template, tool_call_parser="none").tool_parser is None
    assert ChatFormat(template, tool_call_parser="mistral").tool_parser == "mistral"


def test_names_of_parsers_are_checked() -> None:
    assert check_parsers("openai", "auto") == ("harmony", "auto")
    with pytest.raises(ParameterError, match="tool_call_parser"):
        check_parsers("nonsense", "auto")
    with pytest.raises(ParameterError, match="reasoning_parser"):
        check_parsers("auto", "nonsense")
