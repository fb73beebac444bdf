"""Chats that templates refuse, and where templates come from; whatever is refused, the next request works."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import ParameterError

MakeLLM = Callable[..., LLM]
MakeModel = Callable[..., Path]
SHORT = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
USER = {"role": "user", "content": "hi"}

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
# In the manner of Gemma: no system role, and turns that alternate.
STRICT = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
# In the manner of Mistral: turns alternate once tool calls and their results are left out.
ALTERNATING_WITH_TOOLS = (
    "{% set ns = namespace(index=0) %}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and m.tool_calls is not defined) %}"
    "{% if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.index = ns.index + 1 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}{% endfor %}"
)
TOOL_HISTORY = [
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "a1", "type": "function", "function": {"name": "get", "arguments": '{"city": "Oslo"}'}}],
    },
    {"role": "tool", "tool_call_id": "a1", "content": "rain"},
    {"role": "assistant", "content": "It rains."},
    {"role": "user", "content": "and now?"},
]


@pytest.fixture
def model_with(tiny_model: Path, tmp_path: Path) -> MakeModel:
    """Copies the tiny model, with a `chat_template` in its tokenizer's configuration and further files."""

    def make(template: Any = None, **files: str) -> Path:
        folder = tmp_path / "model"
        shutil.copytree(tiny_model, folder, dirs_exist_ok=True)
        path = folder / "tokenizer_config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps(config if template is None else {**config, "chat_template": template}))
        for name, text in files.items():
            (folder / name.replace("_jinja", ".jinja")).write_text(text)
        return folder

    return make


def prompt_of(llm: LLM, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    """The text that a chat becomes."""
    return str(llm.chat(messages, SHORT, use_tqdm=False, **kwargs)[0].prompt)


def refuses(llm: LLM, messages: list[dict[str, Any]], param: str, words: str) -> None:
    """The chat is refused with these words, and nobody else is hurt."""
    running = llm.stats()["generation_tokens"]
    with pytest.raises(ParameterError, match=re.escape(words)) as caught:
        llm.chat(messages, SHORT)
    assert isinstance(caught.value, ValueError)
    assert caught.value.param == param
    assert "\n" not in str(caught.value)
    assert llm.stats()["generation_tokens"] == running
    assert len(llm.generate([5, 6], SHORT)[0].outputs[0].token_ids) == 2


# -- refusals --------------------------------------------------------------------------------------------------------


def test_a_base_model_advises_what_to_do_instead(make_llm: MakeLLM) -> None:
    llm = make_llm()
    refuses(
        llm, [USER], "chat_template", "no chat template, so it is probably a base model; use generate(), or pass one"
    )
    assert prompt_of(llm, [USER], chat_template=PLAIN) == "<user>hi"


def test_what_the_template_says_reaches_the_caller_and_a_chat_that_it_allows_works(
    make_llm: MakeLLM, model_with: MakeModel
) -> None:
    llm = make_llm(model_with(STRICT))
    system = {"role": "system", "content": "be brief"}
    refuses(llm, [system, USER], "messages", "the chat template refuses them: System role not supported")
    refuses(llm, [USER, USER], "messages", "Conversation roles must alternate user/assistant/user/assistant/...")
    refuses(llm, [{"role": "assistant", "content": "x"}], "messages", "Conversation roles must alternate")
    assert prompt_of(llm, [USER, {"role": "assistant", "content": "yes"}, USER]) == "<user>hi<assistant>yes<user>hi"


def test_one_refused_conversation_of_many_stops_all_before_anything_runs(
    make_llm: MakeLLM, model_with: MakeModel
) -> None:
    llm = make_llm(model_with(STRICT))
    with pytest.raises(ParameterError, match="must alternate"):
        llm.chat([[USER], [USER, USER]], SHORT)
    assert llm.stats()["generation_tokens"] == 0


def test_a_stream_of_a_refused_chat_fails_and_the_next_one_works(make_llm: MakeLLM, model_with: MakeModel) -> None:
    llm = make_llm(model_with(STRICT))
    with pytest.raises(ParameterError, match="must alternate"):
        next(llm.stream([USER, USER], SHORT))
    assert len([*llm.stream([USER], SHORT)][-1].outputs[0].token_ids) == 2


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("a\n{% if x %}\nb", "error in line 3"),
        ("{{ x | no_such_filter }}{% endfor %}", "error in line 1"),
        ("\n{{ messages.__class__ }}", "'__class__' in line 2, which the sandbox forbids"),
    ],
)
def test_a_template_with_an_error_fails_at_start_with_its_line(
    make_llm: MakeLLM, model_with: MakeModel, template: str, words: str
) -> None:
    words = words.replace("'", '"')
    with pytest.raises(ParameterError, match=re.escape(words)):
        make_llm(model_with(template))
    with pytest.raises(ParameterError, match=re.escape(words)):
        make_llm(model_with(), chat_template=template + "{# no path #}")
    assert prompt_of(make_llm(model_with(template), chat_template=PLAIN), [USER]) == "<user>hi"


# -- histories with tools --------------------------------------------------------------------------------------------


def test_a_replayed_tool_call_with_null_content_and_a_further_user_turn_are_accepted(
    make_llm: MakeLLM, model_with: MakeModel
) -> None:
    llm = make_llm(model_with(ALTERNATING_WITH_TOOLS))
    expected = '<user>weather?<assistant>[get {"city": "Oslo"}]<tool>rain<assistant>It rains.<user>and now?'
    assert prompt_of(llm, TOOL_HISTORY) == expected
    # A turn that the user broke off leaves two user turns; this template does not allow that.
    refuses(llm, [*TOOL_HISTORY, USER], "messages", "roles must alternate")
    assert prompt_of(llm, TOOL_HISTORY) == expected


def test_a_template_that_knows_no_tools_gives_its_reason(make_llm: MakeLLM, model_with: MakeModel) -> None:
    llm = make_llm(model_with(STRICT))
    refuses(llm, TOOL_HISTORY, "messages", "Conversation roles must alternate")


@pytest.mark.parametrize("content", [None, "", [], [{"type": "text", "text": ""}]])
def test_content_that_is_null_or_empty_is_the_empty_text(
    make_llm: MakeLLM, model_with: MakeModel, content: Any
) -> None:
    llm = make_llm(model_with(PLAIN))
    assistant = {"role": "assistant", "content": content}
    assert prompt_of(llm, [USER, assistant, USER]) == "<user>hi<assistant><user>hi"


def test_a_message_without_content_is_one_with_empty_content(make_llm: MakeLLM, model_with: MakeModel) -> None:
    assert prompt_of(make_llm(model_with(PLAIN)), [USER, {"role": "assistant"}, USER]) == "<user>hi<assistant><user>hi"


# -- where the template comes from -----------------------------------------------------------------------------------


def test_a_file_beside_the_tokenizer_wins_over_its_configuration_and_a_flag_over_both(
    make_llm: MakeLLM, model_with: MakeModel, tmp_path: Path
) -> None:
    folder = model_with("old", chat_template_jinja="new {{ messages[0].content }}")
    assert prompt_of(make_llm(folder), [USER]) == "new hi"
    (tmp_path / "own.jinja").write_text("own {{ messages[0].content }}")
    llm = make_llm(folder, chat_template=str(tmp_path / "own.jinja"))
    assert prompt_of(llm, [USER]) == "own hi"
    assert prompt_of(llm, [USER], chat_template="call {{ messages[0].content }}") == "call hi"


def test_of_several_named_templates_the_default_is_used(make_llm: MakeLLM, model_with: MakeModel) -> None:
    named = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "default {{ messages[0].content }}"}]
    assert prompt_of(make_llm(model_with(named)), [USER]) == "default hi"


def test_a_path_that_names_no_template_is_refused(make_llm: MakeLLM, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="chat_template must be a template, or the path of a readable file"):
        make_llm(chat_template=str(tmp_path / "nothing.jinja"))
