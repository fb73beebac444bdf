"""What OpenAI bodies mean: every field is mapped, or refused by its name."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest

from octavo import SamplingParams
from octavo.batch.bodies import MAX_PROMPTS, parse_chat_body, parse_completion_body
from octavo.errors import ParameterError

DEFAULTS = SamplingParams(temperature=0.6, top_k=40, max_tokens=77)
MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {}}}}
NAMED = {"type": "function", "function": {"name": "get"}}


def chat(**body: Any) -> Any:
    return parse_chat_body({"messages": MESSAGES, **body}, DEFAULTS)


def completion(**body: Any) -> Any:
    return parse_completion_body({"prompt": "hi", **body}, DEFAULTS)


def changed(params: SamplingParams) -> dict[str, Any]:
    """What differs from the defaults."""
    return {
        f.name: getattr(params, f.name)
        for f in fields(SamplingParams)
        if getattr(params, f.name) != getattr(DEFAULTS, f.name)
    }


def test_a_body_that_says_nothing_gets_the_defaults_and_shares_nothing_with_them() -> None:
    parsed = chat()
    assert changed(parsed.params) == {}
    parsed.params.stop.append("x")
    assert DEFAULTS.stop == []
    assert (parsed.stream, parsed.model, parsed.priority, parsed.cache_salt) == (False, None, 0, None)


def test_null_means_not_given() -> None:
    nothing = dict.fromkeys(("temperature", "max_tokens", "stop", "n", "logprobs", "tools", "response_format", "user"))
    assert changed(chat(**nothing).params) == {}
    assert changed(completion(**dict.fromkeys(("logprobs", "echo", "suffix", "best_of", "seed"))).params) == {}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"top_p": 0.5, "n": 3, "seed": -1}, {"top_p": 0.5, "n": 3, "seed": -1}),
        ({"presence_penalty": 1, "frequency_penalty": -2}, {"presence_penalty": 1.0, "frequency_penalty": -2.0}),
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"stop": "x"}, {"stop": ["x"]}),
        ({"stop": ["x", "y"]}, {"stop": ["x", "y"]}),
        ({"logit_bias": {"12": -100, "7": 1.5}}, {"logit_bias": {12: -100.0, 7: 1.5}}),
        ({"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.2}, {"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.2}),
        ({"min_tokens": 2, "ignore_eos": True}, {"min_tokens": 2, "ignore_eos": True}),
        ({"stop_token_ids": [4], "bad_words": ["no"]}, {"stop_token_ids": [4], "bad_words": ["no"]}),
    ],
)
def test_sampling_fields_mean_the_same_in_both_kinds(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert changed(chat(**given).params) == expected
    assert changed(completion(**given).params) == expected


def test_the_newer_name_of_max_tokens_wins() -> None:
    assert chat(max_completion_tokens=9).params.max_tokens == 9
    assert chat(max_completion_tokens=9, max_tokens=3).params.max_tokens == 9
    with pytest.raises(ParameterError, match="no such field"):
        completion(max_completion_tokens=9)


def test_logprobs_of_a_chat_are_a_flag_and_a_number() -> None:
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).params.logprobs == 4
    assert chat(logprobs=False).params.logprobs is None
    for given in (
        {"top_logprobs": 4},
        {"logprobs": True, "top_logprobs": -1},
        {"logprobs": True, "top_logprobs": True},
    ):
        with pytest.raises(ParameterError) as caught:
            chat(**given)
        assert caught.value.param == "top_logprobs"


def test_logprobs_of_a_completion_are_a_number_and_echo_asks_for_the_prompts_too() -> None:
    assert completion(logprobs=0).params.logprobs == 0
    parsed = completion(logprobs=2, echo=True)
    assert (parsed.params.logprobs, parsed.params.prompt_logprobs, parsed.echo) == (2, 2, True)
    assert completion(echo=True).params.prompt_logprobs is None


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", [("a", None)]),
        ("", [("", None)]),
        (["a", "b"], [("a", None), ("b", None)]),
        ([1, 2], [(None, [1, 2])]),
        ([[1], [2, 3]], [(None, [1]), (None, [2, 3])]),
    ],
)
def test_a_prompt_has_four_forms(prompt: Any, expected: list[Any]) -> None:
    assert [(p.text, p.token_ids) for p in completion(prompt=prompt).prompts] == expected


@pytest.mark.parametrize("prompt", [None, [], [[]], [None], [1, "a"], ["a", 1], [1.5], {"prompt": "a"}, 3, [True]])
def test_a_prompt_of_another_form_is_refused(prompt: Any) -> None:
    with pytest.raises(ParameterError) as caught:
        completion(prompt=prompt)
    assert caught.value.param == "prompt"


def test_prompts_are_limited_in_number_but_not_in_length() -> None:
    assert len(completion(prompt=[7] * (MAX_PROMPTS + 1)).prompts) == 1
    with pytest.raises(ParameterError, match=f"at most {MAX_PROMPTS}"):
        completion(prompt=["a"] * (MAX_PROMPTS + 1))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 100_000}, "n"),
        ({"n": True}, "n"),
        ({"stop": [""]}, "stop"),
        ({"stop": 3}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logprobs": 1}, "logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"other": True}}, "stream_options"),
        ({"model": 3}, "model"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
        ({"tools": {"type": "function"}}, "tools"),
        ({"tools": [TOOL, {"type": "function"}]}, "tools[1]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0]"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "none"}}}, "tool_choice"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"functions": [TOOL["function"]]}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"temprature": 1}, "temprature"),
        ({"detokenize": False}, "detokenize"),
        ({"prompt": "hi"}, "prompt"),
    ],
)
def test_what_is_wrong_unknown_or_not_supported_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ParameterError) as caught:
        chat(**body)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"echo": 1}, "echo"),
        ({"tools": [TOOL]}, "tools"),
        ({"logprobs": True}, "logprobs"),
    ],
)
def test_a_completion_refuses_what_it_cannot_do(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ParameterError) as caught:
        completion(**body)
    assert caught.value.param == param


def test_what_asks_for_nothing_that_is_lacking_is_accepted() -> None:
    harmless = {
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "none",
        "modalities": ["text"],
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
    }
    assert changed(chat(**harmless).params) == {}
    assert completion(n=2, best_of=2, suffix="").params.n == 2


def test_template_arguments_and_the_reasoning_effort_reach_the_template() -> None:
    parsed = chat(chat_template_kwargs={"a": 1}, reasoning_effort="low", continue_final_message=True)
    assert parsed.template == {
        "continue_final_message": True,
        "chat_template_kwargs": {"reasoning_effort": "low", "a": 1},
    }


def test_no_request_brings_its_own_template() -> None:
    with pytest.raises(ParameterError, match=r"chat_template must be left out: .*--chat-template"):
        chat(chat_template="{{ messages[0].content }}")


def test_every_field_that_asks_for_a_form_becomes_one_parameter() -> None:
    schema = {"type": "object", "title": "é"}
    forms: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"response_format": {"type": "json_object"}}, {"json": {"type": "object"}}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}},
            {"json": schema},
        ),
        ({"structured_outputs": {"json": json.dumps(schema)}}, {"json": schema}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_grammar": "start: /a/"}, {"grammar": "start: /a/"}),
    ]
    for given, expected in forms:
        for parsed in (chat(**given), completion(**given)):
            found = parsed.params.structured_outputs
            assert found is not None
            assert json.loads(found.options) == expected
    assert chat(response_format={"type": "text"}).params.structured_outputs is None


def test_tools_reach_the_template_with_whether_they_may_be_used() -> None:
    assert chat(tools=[TOOL]).template == {"tools": [TOOL], "parallel_tool_calls": True}
    for choice in ("none", "required", NAMED):
        template = chat(tools=[TOOL], tool_choice=choice).template
        assert template == {"tools": [TOOL], "parallel_tool_calls": True, "tool_choice": choice}
        assert chat(tools=[TOOL], tool_choice=choice).names_function == (choice == NAMED)
    assert chat(tools=[TOOL]).parallel_tool_calls
    assert not chat(tools=[TOOL], parallel_tool_calls=False).parallel_tool_calls


def test_a_stream_may_ask_for_the_usage() -> None:
    parsed = chat(stream=True, stream_options={"include_usage": True})
    assert parsed.stream
    assert parsed.include_usage


def test_the_sampling_parameters_of_the_protocol_are_all_mapped_or_left_out_on_purpose() -> None:
    left_out = {"logprobs", "prompt_logprobs", "detokenize"}  # under other names, or without meaning
    for f in fields(SamplingParams):
        if f.name in left_out:
            continue
        with pytest.raises(ParameterError) as caught:
            chat(**{f.name: object()})
        assert "no such field" not in str(caught.value), f.name
