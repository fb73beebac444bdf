"""Reasoning and calls of functions in a conversation: how they are shown, kept and answered."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from octavo import LLM
from octavo.cli.chat import commands
from octavo.cli.chat.session import AnswerStats, ChatError, ChatSession
from octavo.cli.chat.view import AnswerView
from octavo.errors import ParameterError
from octavo.outputs import MessageDelta, RequestOutput
from octavo.requests import RequestAssembler, Submission
from tests.cli.conftest import EXACT, Terminal, octavo

# In the manner of Qwen 3.
TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}<tool_call>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments.city }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and enable_thinking %}<think>{% else %}<think></think>{% endif %}{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def call(city: str) -> str:
    return f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'


@pytest.fixture(scope="module")
def llm(chat_model: Path) -> Iterator[LLM]:
    with LLM(
        str(chat_model), backend="reference", dtype="float32", disable_log_stats=True, chat_template=TEMPLATE
    ) as made:
        yield made


@pytest.fixture
def session(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ChatSession]:
    """Makes a session whose model writes the texts given, four characters at a time; `prompts` gets what it is asked."""

    def make(*texts: str, finish: str = "stop", prompts: list[str] | None = None) -> ChatSession:
        left = iter(texts)

        @contextmanager
        def submit(submissions: list[Submission]) -> Iterator[Any]:
            (submission,), text = submissions, next(left)
            if prompts is not None:
                prompts.append(submission.prompt or "")
            yield SimpleNamespace(updates=lambda: updates(submission, text), unfinished=set())

        def updates(submission: Submission, text: str) -> Iterator[RequestOutput]:
            assembler = RequestAssembler(1, submission, llm.engine.tokenizer)
            for i in range(0, len(text), 4):
                last = i + 4 >= len(text)
                change = SimpleNamespace(
                    index=0,
                    text=text[i : i + 4],
                    token_ids=[i],
                    logprobs=[],
                    text_offsets=[],
                    finish_reason=finish if last else None,
                    stop_reason=None,
                )
                fields = {
                    "num_cached_tokens": 0,
                    "finished": last,
                    "error": None,
                    "prompt_logprobs": None,
                    "pooled": None,
                }
                yield assembler.merge(SimpleNamespace(request_id=1, choices=[change], **fields))  # type: ignore[arg-type]

        monkeypatch.setattr(llm.engine, "submit", submit)
        return ChatSession(llm.engine, "tiny", {"max_tokens": 50}, None, False, TOOLS)

    return make


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def viewed(stream: io.StringIO, answer: Callable[[Callable[[MessageDelta], None]], AnswerStats]) -> str:
    view = AnswerView(stream)
    answer(view.show)
    view.finish()
    return stream.getvalue()


THOUGHT = f"<think>\nIt may\nrain.\n</think>\n\nI look.\n{call('Oslo')}\n{call('Bergen')}"
CALLS = 'I look.\ncall: weather({"city": "Oslo"})\ncall: weather({"city": "Bergen"})\n'


def test_thinking_is_dimmed_and_calls_have_lines_of_their_own(
    session: Callable[..., ChatSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    shown = viewed(Screen(), lambda show: session(THOUGHT).ask("hi", show))
    thought, answer = shown[: shown.rindex("\x1b[0m")], shown[shown.rindex("\x1b[0m") + 4 :]
    pieces = thought.split("\x1b[2m")
    assert pieces[0] == ""
    assert "".join(piece.removesuffix("\x1b[0m") for piece in pieces) == "It may\nrain.\n"
    assert answer == "\n" + CALLS


def test_without_colours_headings_tell_thinking_from_the_answer(
    session: Callable[..., ChatSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    shown = viewed(Screen(), lambda show: session(THOUGHT).ask("hi", show))
    assert shown == "thinking:\nIt may\nrain.\n\nanswer:\n" + CALLS


def test_a_pipe_gets_the_answer_without_the_thinking(session: Callable[..., ChatSession]) -> None:
    assert viewed(io.StringIO(), lambda show: session(THOUGHT).ask("hi", show)) == CALLS
    assert viewed(io.StringIO(), lambda show: session("<think>a</think>b").ask("hi", show)) == "b\n"


def test_the_model_goes_on_when_each_call_has_its_result(session: Callable[..., ChatSession]) -> None:
    prompts: list[str] = []
    told: list[str] = []
    chat = session(THOUGHT, "Rain in both.", prompts=prompts)
    chat.ask("weather?", lambda _: None)
    context = commands.Context(chat, told.append, lambda stream: told.append(str(stream(lambda _: None))))
    commands.run("/result rain", context)
    assert told == ["1 more to answer: weather"]
    assert len(prompts) == 1
    commands.run("/result snow", context)
    question, asked, rain, snow, answer = chat.messages
    assert question == {"role": "user", "content": "weather?"}
    assert asked["reasoning_content"].strip() == "It may\nrain."
    ids = [one["id"] for one in asked["tool_calls"]]
    assert [(m["role"], m["tool_call_id"], m["content"]) for m in (rain, snow)] == [
        ("tool", ids[0], "rain"),
        ("tool", ids[1], "snow"),
    ]
    assert answer == {"role": "assistant", "content": "Rain in both."}
    assert json.dumps(TOOLS[0]) in prompts[0]
    assert "weatherOsloweatherBergen<tool>rain<tool>snow<assistant>" in prompts[1]
    assert chat.num_exchanges == 1
    with pytest.raises(ChatError, match="no call waits"):
        chat.add_result("hail")
    assert chat.undo() == "weather?"
    assert chat.messages == []


def test_a_call_that_was_cut_is_not_kept(session: Callable[..., ChatSession]) -> None:
    chat = session(f"So.\n{call('Oslo')}\n{call('Bergen')[:-20]}", finish="length")
    chat.ask("weather?", lambda _: None)
    assert [one["function"]["arguments"] for one in chat.messages[-1]["tool_calls"]] == ['{"city": "Oslo"}']


def test_regen_writes_the_answer_before_half_given_results_anew(session: Callable[..., ChatSession]) -> None:
    chat = session(THOUGHT, "No need.")
    chat.ask("weather?", lambda _: None)
    chat.add_result("rain")
    chat.regenerate(lambda _: None)
    assert [message["content"] for message in chat.messages] == ["weather?", "No need."]


def test_a_conversation_with_calls_is_saved_and_loaded(session: Callable[..., ChatSession], tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    chat = session(THOUGHT, "Rain in both.")
    chat.ask("weather?", lambda _: None)
    for results in range(3):
        chat.save(path)
        loaded = session()
        loaded.load(path)
        assert loaded.messages == chat.messages
        assert len(loaded.pending_calls()) == 2 - results
        if results < 2:
            chat.add_result("rain")
    for wrong in (
        [{"role": "tool", "content": "x"}],
        [{"role": "user", "content": "x"}, {"role": "tool", "content": "x"}],
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}],
    ):
        path.write_text(json.dumps(wrong))
        with pytest.raises(ParameterError):
            chat.load(path)


def test_thinking_is_switched_by_the_templates_own_argument(session: Callable[..., ChatSession]) -> None:
    prompts: list[str] = []
    told: list[str] = []
    chat = session("a", "b", "c", prompts=prompts)
    context = commands.Context(chat, told.append, lambda _: None)
    for line in ("/think on", "/think off", "/think default"):
        commands.run(line, context)
        chat.ask("hi", lambda _: None)
    assert told == ["think = on", "think = off", "think = default"]
    assert [prompt.endswith("<think>") for prompt in prompts] == [True, False, False]
    with pytest.raises(ParameterError, match="one of on, off"):
        commands.run("/think hard", context)


def test_a_template_without_a_switch_says_so(small_llm: LLM) -> None:
    chat = ChatSession(small_llm.engine, "tiny", {}, None, False)
    with pytest.raises(ParameterError, match="cannot switch its thinking"):
        chat.set_thinking("off")


@pytest.fixture
def template_file(tmp_path: Path) -> str:
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    return str(path)


def test_a_terminal_shows_thinking_in_its_style_and_a_pipe_nothing_of_it(
    terminal: Callable[..., Terminal], chat_model: Path, template_file: str
) -> None:
    arguments = ["--chat-template", template_file, "--think", "on", "--max-tokens", "8", "--ignore-eos"]
    coloured = terminal(*arguments)
    coloured.enter("hello")
    assert b"\x1b[2m" in coloured.raw
    assert "thinking:" not in coloured.text
    plain = terminal(*arguments, NO_COLOR="1")
    plain.enter("hello")
    assert "thinking:" in plain.text
    assert b"\x1b[2m" not in plain.raw
    piped = octavo("chat", str(chat_model), *EXACT, *arguments, stdin=b"hello\n")
    assert (piped.returncode, piped.stdout) == (0, b"\n")


def test_tools_that_cannot_be_used_are_refused_before_the_chat(
    chat_model: Path, template_file: str, tmp_path: Path
) -> None:
    functions, broken = tmp_path / "functions.json", tmp_path / "broken.json"
    functions.write_text(json.dumps(TOOLS))
    broken.write_text("{}")
    for path, words in (
        (broken, b"a list of"),
        (tmp_path / "none.json", b"a readable JSON file"),
        (functions, b"the chat template has no place for tools"),
    ):
        found = octavo("chat", str(chat_model), *EXACT, "--tools", str(path), stdin=b"hello\n")
        assert found.returncode == 2
        assert words in found.stderr
        assert found.stderr.count(b"\n") == 1
    working = ["--chat-template", template_file, "--tools", str(functions), "--max-tokens", "4"]
    assert octavo("chat", str(chat_model), *EXACT, *working, stdin=b"hello\n").returncode == 0
