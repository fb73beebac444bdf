"""Answers as messages, by a model that says a known text: reasoning, content and tool calls, whole and while they grow."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, AsyncLLM, SamplingParams
from octavo.errors import ParameterError
from octavo.outputs import ChatMessage, RequestOutput
from tests.engine.speaker import make_speaker

MakeLLM = Callable[..., LLM]
SETTINGS: dict[str, Any] = {"backend": "reference", "dtype": "float32", "disable_log_stats": True}
GREEDY = SamplingParams(temperature=0, max_tokens=500)
USER = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "metric": {"type": "boolean"}},
        },
    },
}
ARGUMENTS = {"city": "0451", "days": 3, "metric": True}

MESSAGES = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
# What tells the formats apart is in every template of their kind: how an earlier call is written.
HERMES = TOOLS + "{% if false %}<tool_call><think></think>{% endif %}" + MESSAGES
CODER = TOOLS + "{% if false %}<function=x><parameter=y>{% endif %}" + MESSAGES
LLAMA = TOOLS + "{% if false %}<|python_tag|>{% endif %}" + MESSAGES
MISTRAL = TOOLS + "{% if false %}[TOOL_CALLS]{% endif %}" + MESSAGES
R1 = "{% if false %}<｜Assistant｜></think>{% endif %}" + MESSAGES
HARMONY = TOOLS + "{% if false %}<|channel|>analysis<|message|>{% endif %}" + MESSAGES

HERMES_TEXT = (
    "<think>\nDie Frage ist: 日本 oder Köln? 😀\n</think>\n\nIch sehe nach.\n"
    f'<tool_call>\n{{"name": "weather", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
CODER_TEXT = (
    "<tool_call>\n<function=weather>\n<parameter=city>\n0451\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "<parameter=metric>\nTrue\n</parameter>\n</function>\n</tool_call>"
)
LLAMA_TEXT = '<|python_tag|>weather.call(city="0451", days="3", metric="true")'
MISTRAL_TEXT = f"Moment. [TOOL_CALLS]weather[ARGS]{json.dumps(ARGUMENTS)}"
HARMONY_TEXT = (
    "<|channel|>analysis<|message|>Which city?<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
    f"<|constrain|>json<|message|>{json.dumps(ARGUMENTS)}<|call|>"
)


@pytest.fixture
def speaker(make_llm: MakeLLM, tmp_path: Path) -> Callable[..., LLM]:
    """Starts a model that says a text."""

    def make(text: str, template: str = HERMES, specials: tuple[str, ...] = (), **kwargs: Any) -> LLM:
        return make_llm(make_speaker(tmp_path, text, template, specials), **kwargs)

    return make


def answer(llm: LLM, **kwargs: Any) -> RequestOutput:
    return llm.chat(USER, GREEDY, use_tqdm=False, **kwargs)[0]


def message(llm: LLM, **kwargs: Any) -> ChatMessage:
    found = answer(llm, **kwargs).outputs[0].message
    assert found is not None
    return found


def calls(found: ChatMessage) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in found.tool_calls]


def without_ids(found: ChatMessage) -> tuple[str, str | None, list[tuple[str, str]]]:
    return found.content, found.reasoning_content, [(call.name, call.arguments) for call in found.tool_calls]


# -- whole messages --------------------------------------------------------------------------------------------------


def test_an_answer_is_split_and_its_text_stays_as_it_was_written(speaker: Callable[..., LLM]) -> None:
    output = answer(speaker(HERMES_TEXT), tools=[WEATHER])
    choice = output.outputs[0]
    assert choice.message is not None
    assert choice.text == HERMES_TEXT
    assert choice.finish_reason == "stop"
    assert choice.message.reasoning_content == "Die Frage ist: 日本 oder Köln? 😀\n"
    assert choice.message.content == "Ich sehe nach.\n"
    assert calls(choice.message) == [("weather", ARGUMENTS), ("now", {})]
    assert len({call.id for call in choice.message.tool_calls}) == 2
    assert json.dumps(WEATHER) in str(output.prompt)


def test_without_tools_what_looks_like_a_call_is_content(speaker: Callable[..., LLM]) -> None:
    llm = speaker(HERMES_TEXT)
    content = HERMES_TEXT.partition("</think>\n\n")[2]
    for options in ({}, {"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}):
        output = answer(llm, **options)
        assert output.outputs[0].message == ChatMessage(content, "Die Frage ist: 日本 oder Köln? 😀\n")
        assert "weather" not in str(output.prompt)


def test_a_completion_has_no_message(speaker: Callable[..., LLM]) -> None:
    choice = speaker(HERMES_TEXT).generate("hi>", GREEDY, use_tqdm=False)[0].outputs[0]
    assert (choice.text, choice.message, choice.deltas) == (HERMES_TEXT, None, [])


@pytest.mark.parametrize(
    ("text", "template", "specials"),
    [
        (CODER_TEXT, CODER, ()),
        (LLAMA_TEXT, LLAMA, ("<|python_tag|>",)),
        (MISTRAL_TEXT, MISTRAL, ("[TOOL_CALLS]", "[ARGS]")),
    ],
)
def test_calls_of_other_formats_have_the_types_of_the_tools_and_their_markers_may_be_special(
    speaker: Callable[..., LLM], text: str, template: str, specials: tuple[str, ...]
) -> None:
    choice = answer(speaker(text, template, specials), tools=[WEATHER]).outputs[0]
    assert choice.message is not None
    assert calls(choice.message) == [("weather", ARGUMENTS)]
    assert choice.text == text


def test_ids_of_calls_are_such_as_mistrals_templates_take(speaker: Callable[..., LLM]) -> None:
    (call,) = message(speaker(MISTRAL_TEXT, MISTRAL), tools=[WEATHER]).tool_calls
    assert len(call.id) == 9
    assert call.id.isalnum()


def test_the_channels_of_gpt_oss_are_read_with_and_without_tools(speaker: Callable[..., LLM]) -> None:
    llm = speaker(HARMONY_TEXT, HARMONY, ("<|end|>", "<|start|>", "<|call|>", "<|return|>"))
    found = message(llm, tools=[WEATHER])
    assert found.reasoning_content == "Which city?"
    assert calls(found) == [("weather", ARGUMENTS)]
    assert message(llm).reasoning_content == "Which city?"


def test_an_open_reasoning_goes_on_and_a_continued_answer_does_not_begin_anew(speaker: Callable[..., LLM]) -> None:
    llm = speaker("so it is\n</think>\n\nyes", R1)
    assert message(llm) == ChatMessage("yes", "so it is\n")
    # The prompt must end as the speaker expects.
    continued = [*USER, {"role": "assistant", "content": "<think>why</think>well>"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    found = llm.chat(continued, GREEDY, use_tqdm=False, **options)[0].outputs[0].message  # type: ignore[arg-type]
    assert found == ChatMessage("so it is\n</think>\n\nyes")
    inside = [*USER, {"role": "assistant", "content": "<think>why>"}]
    found = llm.chat(inside, GREEDY, use_tqdm=False, **options)[0].outputs[0].message  # type: ignore[arg-type]
    assert found == ChatMessage("yes", "so it is\n")


def test_an_answer_that_is_cut_inside_a_call_keeps_what_there_is_of_it(speaker: Callable[..., LLM]) -> None:
    llm = speaker(HERMES_TEXT)
    cut = HERMES_TEXT.index('"days')
    params = SamplingParams(temperature=0, max_tokens=500, stop=HERMES_TEXT[cut : cut + 6])
    choice = llm.chat(USER, params, tools=[WEATHER], use_tqdm=False)[0].outputs[0]
    assert choice.message is not None
    assert [(call.name, call.arguments) for call in choice.message.tool_calls] == [("weather", '{"city": "0451", ')]


def test_a_message_goes_on_as_part_of_the_conversation(speaker: Callable[..., LLM]) -> None:
    llm = speaker(HERMES_TEXT)
    found = message(llm, tools=[WEATHER]).to_dict()
    assert (found["role"], found["content"]) == ("assistant", "Ich sehe nach.\n")
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "rain"} for call in found["tool_calls"]]
    output = llm.chat([*USER, found, *results], GREEDY, use_tqdm=False)[0]
    assert str(output.prompt).endswith("<assistant>Ich sehe nach.\n<tool>rain<tool>rain<assistant>")


def test_many_conversations_keep_their_order_and_their_choices_are_read_apart(speaker: Callable[..., LLM]) -> None:
    llm = speaker(HERMES_TEXT)
    params = SamplingParams(temperature=0, max_tokens=500, n=2)
    conversations = [[{"role": "user", "content": f"number {i}"}] for i in range(9)]
    outputs = llm.chat(conversations, params, tools=[WEATHER], use_tqdm=False)
    for i, output in enumerate(outputs):
        assert f"number {i}<" in str(output.prompt)
        first, second = (choice.message for choice in output.outputs)
        assert first is not None
        assert second is not None
        assert without_ids(first) == without_ids(second)
        assert calls(first) == [("weather", ARGUMENTS), ("now", {})]


# -- which parsers ---------------------------------------------------------------------------------------------------


def test_the_engines_arguments_win_over_the_template(speaker: Callable[..., LLM]) -> None:
    llm = speaker(HERMES_TEXT, tool_call_parser="none", reasoning_parser="none")
    assert message(llm, tools=[WEATHER]) == ChatMessage(HERMES_TEXT)
    unknown = TOOLS + MESSAGES
    llm = speaker(HERMES_TEXT, unknown, tool_call_parser="hermes")
    assert calls(message(llm, tools=[WEATHER])) == [("weather", ARGUMENTS), ("now", {})]


def test_tools_that_the_model_would_not_see_or_nobody_would_read_are_refused(speaker: Callable[..., LLM]) -> None:
    llm = speaker("hi there", MESSAGES)
    for template, words in ((None, "no place for tools"), (TOOLS + MESSAGES, "how calls are written")):
        with pytest.raises(ParameterError, match=words) as caught:
            llm.chat(USER, GREEDY, tools=[WEATHER], chat_template=template)
        assert caught.value.param == "tools"
    assert message(llm) == ChatMessage("hi there")


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": "weather"}, "tools"),
        ({"tools": [1]}, "tools"),
        ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": float("nan")}}]}, "tools"),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs"),
        ({"add_generation_prompt": 1}, "add_generation_prompt"),
    ],
)
def test_wrong_options_are_refused_by_name(make_llm: MakeLLM, options: dict[str, Any], param: str) -> None:
    with pytest.raises(ParameterError) as caught:
        make_llm(chat_template=HERMES).chat(USER, GREEDY, **options)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "arguments",
    [{"tool_call_parser": "json"}, {"reasoning_parser": "r1"}, {"tool_call_parser": 3}],
)
def test_a_parser_that_does_not_exist_is_refused_before_anything_is_loaded(arguments: dict[str, Any]) -> None:
    with pytest.raises(ParameterError) as caught:
        LLM("no/such-model", **arguments)
    assert [caught.value.param] == list(arguments)


def test_parsers_of_different_formats_exclude_each_other() -> None:
    with pytest.raises(ParameterError, match="cannot be combined"):
        LLM("no/such-model", tool_call_parser="hermes", reasoning_parser="gpt_oss")


# -- growing messages ------------------------------------------------------------------------------------------------


def test_joined_deltas_are_the_whole_message_in_order(speaker: Callable[..., LLM]) -> None:
    llm = speaker(HERMES_TEXT)
    joined, kinds = ChatMessage(), []
    for output in llm.stream(USER, GREEDY, tools=[WEATHER]):
        choice = output.outputs[0]
        for delta in choice.deltas:
            joined.add(delta)
            parts = {"r": delta.reasoning_content, "c": delta.content, "t": delta.tool_call}
            (kind,) = [name for name, part in parts.items() if part is not None]
            kinds.append(kind)
        assert joined == choice.message
    assert without_ids(joined) == without_ids(message(llm, tools=[WEATHER]))
    assert "".join(kinds).lstrip("r").lstrip("c").lstrip("t") == ""
    assert min(kinds.count(kind) for kind in "rct") >= 2


def test_a_reader_that_comes_late_gets_all_deltas_at_once(tmp_path: Path) -> None:
    llm = AsyncLLM(str(make_speaker(tmp_path, HERMES_TEXT, HERMES)), **SETTINGS)

    async def main() -> tuple[ChatMessage, ChatMessage | None, int]:
        joined, whole, times = ChatMessage(), None, 0
        async for output in llm.chat(USER, GREEDY, tools=[WEATHER]):
            times += 1
            for delta in output.outputs[0].deltas:
                joined.add(delta)
            whole = output.outputs[0].message
            if times == 2:  # this loop takes no updates meanwhile
                while llm.stats()["num_running"]:
                    await asyncio.to_thread(lambda: None)
                await asyncio.sleep(0.2)
        return joined, whole, times

    try:
        joined, whole, times = asyncio.run(main())
    finally:
        llm.shutdown()
    assert joined == whole
    assert calls(joined) == [("weather", ARGUMENTS), ("now", {})]
    assert times <= 3


def test_options_belong_to_conversations(make_llm: MakeLLM) -> None:
    with pytest.raises(ParameterError, match="only conversations") as caught:
        next(make_llm().stream("hi", GREEDY, tools=[WEATHER]))
    assert caught.value.param == "tools"
