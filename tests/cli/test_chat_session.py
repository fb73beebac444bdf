"""A conversation and its commands, without a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM
from octavo.cli.chat import commands
from octavo.cli.chat.reader import LineReader, is_open, unquote
from octavo.cli.chat.session import AnswerStats, ChatError, ChatSession
from octavo.errors import OctavoError, ParameterError
from octavo.outputs import MessageDelta

GIVEN = {"max_tokens": 8, "ignore_eos": True, "seed": 1}


@pytest.fixture
def make(small_llm: LLM) -> Callable[..., ChatSession]:
    def session(system: str | None = None, context_shift: bool = False, **given: Any) -> ChatSession:
        return ChatSession(small_llm.engine, "tiny", {**GIVEN, **given}, system, context_shift)

    return session


def ask(session: ChatSession, text: str) -> tuple[str, AnswerStats]:
    shown: list[MessageDelta] = []
    stats = session.ask(text, shown.append)
    return "".join(delta.content or "" for delta in shown), stats


def test_what_is_shown_is_the_engines_answer_to_the_whole_conversation(
    make: Callable[..., ChatSession], small_llm: LLM
) -> None:
    session = make(system="be brief")
    first, _ = ask(session, "hello")
    before = session.conversation()
    second, stats = ask(session, "again")
    messages = [*before, {"role": "user", "content": "again"}]
    expected = small_llm.chat(messages, session.params(), use_tqdm=False)[0]
    assert second == expected.outputs[0].text
    assert before == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": first},
    ]
    assert stats.prompt_tokens == len(expected.prompt_token_ids)
    assert (stats.output_tokens, stats.finish_reason) == (8, "length")
    assert (stats.context_used, stats.context_size) == (stats.prompt_tokens + 8, 200)


def test_an_interrupted_answer_keeps_what_was_shown(make: Callable[..., ChatSession]) -> None:
    session = make(max_tokens=150, allowed_token_ids=[80])
    shown: list[str] = []

    def show(delta: MessageDelta) -> None:
        shown.append(delta.content or "")
        if len("".join(shown)) >= 5:
            session.interrupt()

    stats = session.ask("hello", show)
    assert stats.finish_reason == "abort"
    assert 5 <= stats.output_tokens < 150
    assert session.messages[-1] == {"role": "assistant", "content": "".join(shown)}
    session.set("max_tokens", 8)
    assert ask(session, "go on")[1].cached_tokens > 0


def test_an_answer_that_is_stopped_before_its_first_word_leaves_no_trace(make: Callable[..., ChatSession]) -> None:
    session = make()
    ask(session, "hello")
    before = list(session.messages)
    render = session.engine.render_chat

    def stopped(*args: Any, **kwargs: Any) -> Any:
        session.interrupt()
        return render(*args, **kwargs)

    session.engine.render_chat = stopped  # type: ignore[method-assign]
    try:
        with pytest.raises(ChatError, match="stopped before the first word"):
            session.ask("x" * 80, lambda _: None)
    finally:
        session.engine.render_chat = render  # type: ignore[method-assign]
    assert session.messages == before


def test_a_full_context_says_what_to_do_and_takes_the_message_back(make: Callable[..., ChatSession]) -> None:
    session = make()
    with pytest.raises(ChatError, match=r"the context is full: 2\d\d of 200 tokens .* shorten it"):
        ask(session, "x" * 220)
    assert session.messages == []
    ask(session, "x" * 120)
    with pytest.raises(ChatError, match=r"/undo takes back an exchange, /clear starts anew"):
        ask(session, "x" * 60)
    assert len(session.messages) == 2


def test_with_context_shift_the_oldest_exchanges_make_room(make: Callable[..., ChatSession]) -> None:
    session = make(system="stay", context_shift=True)
    for i in range(8):
        _, stats = ask(session, f"message {i} " + "x" * 30)
        assert stats.output_tokens == 8
        assert stats.dropped_messages % 2 == 0
    assert 2 <= stats.dropped_messages < 8
    assert len(session.messages) >= 4
    assert session.conversation()[0]["content"] == "stay"
    assert session.messages[-2]["content"].startswith("message 7")
    with pytest.raises(ChatError, match="shorten it"):
        ask(session, "x" * 300)
    assert session.messages[-2]["content"].startswith("message 7")


def test_settings_are_checked_and_a_wrong_one_changes_nothing(make: Callable[..., ChatSession]) -> None:
    session = make()
    session.set("temperature", 0.25)
    for name, value in (("temperature", -1), ("top_p", "x"), ("n", 2), ("colour", 1), ("stop_token_ids", [320])):
        with pytest.raises(ParameterError):
            session.set(name, value)
    assert session.given == {**GIVEN, "temperature": 0.25}
    session.unset("temperature")
    assert session.params().temperature == 1.0


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def run(make: Callable[..., ChatSession], told: list[str]) -> Callable[..., ChatSession]:
    """Runs commands in a conversation of one exchange; notes go to `told`."""
    session = make()
    ask(session, "hello")

    def one(*lines: str) -> ChatSession:
        context = commands.Context(session, told.append, lambda stream: told.append(str(stream(lambda _: None))))
        for line in lines:
            commands.run(line, context)
        return session

    return one


def test_regen_replaces_the_last_answer_and_undo_takes_the_exchange_back(
    run: Callable[..., ChatSession], told: list[str]
) -> None:
    session = run()
    before = list(session.messages)
    assert run("/regen").messages == before  # the seed is set
    assert "the answer will be the same" in told[0]
    assert run("/set seed 2", "/regen").messages[0] == before[0]
    assert session.messages[1] != before[1]
    assert run("/undo").messages == []
    for command in ("/undo", "/regen"):
        with pytest.raises(ChatError):
            run(command)


def test_values_are_json_and_stop_is_text(run: Callable[..., ChatSession]) -> None:
    session = run(
        "/set temperature 0.5",
        "/set stop END of it",
        "/set max-tokens none",
        "/set ignore_eos False",
        '/set logit_bias {"5": 3}',
    )
    params = session.params()
    assert (params.temperature, params.stop, params.max_tokens) == (0.5, ["END of it"], None)
    assert params.ignore_eos is False
    assert params.logit_bias == {5: 3.0}
    assert run('/set stop ["a", "\\n"]').params().stop == ["a", "\n"]
    assert run("/set stop default").params().stop == []


def test_the_system_message_can_be_set_shown_and_removed(run: Callable[..., ChatSession], told: list[str]) -> None:
    assert run("/system Be brief.").system == "Be brief."
    run("/system")
    assert told[-1] == "system: Be brief."
    assert run('/system ""').system is None


def test_a_saved_conversation_comes_back_with_its_settings(
    run: Callable[..., ChatSession], make: Callable[..., ChatSession], tmp_path: Path
) -> None:
    path = tmp_path / "chat.json"
    session = run("/system Be brief.", "/set temperature 0.5", f"/save {path}", f"/save {path}")
    loaded = make(top_k=3)
    loaded.load(path)
    assert loaded.conversation() == session.conversation()
    assert loaded.given == session.given
    assert list(tmp_path.iterdir()) == [path]
    path.write_text(json.dumps(session.conversation()))
    loaded.load(path)
    assert loaded.given == {}


@pytest.mark.parametrize(
    "text",
    [
        "no json",
        "3",
        '{"messages": "x"}',
        '{"messages": [{"role": "user", "content": "x"}]}',
        '{"messages": [{"role": "assistant", "content": "x"}, {"role": "user", "content": "x"}]}',
        '{"messages": [{"role": "user", "content": null}, {"role": "assistant", "content": "x"}]}',
        '{"messages": [], "sampling": {"temperature": -1}}',
        '{"messages": [], "sampling": {"n": 2}}',
        '{"messages": [], "sampling": 3}',
        "[" * 100_000,
    ],
)
def test_a_file_that_is_no_conversation_changes_nothing(
    run: Callable[..., ChatSession], tmp_path: Path, text: str
) -> None:
    path = tmp_path / "chat.json"
    path.write_text(text)
    session = run()
    before = session.conversation(), session.given
    with pytest.raises(OctavoError):
        run(f"/load {path}")
    assert (session.conversation(), session.given) == before


def test_saving_replaces_no_other_file(run: Callable[..., ChatSession], tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    for command in (f"/save {notes}", f"/save {tmp_path}", "/save /proc/none", "/save", "/load", "/load /none"):
        with pytest.raises(OctavoError):
            run(command)
    assert notes.read_text() == "mine"


def test_an_unknown_command_is_an_error_and_exit_leaves(run: Callable[..., ChatSession]) -> None:
    with pytest.raises(ChatError, match="did you mean /undo"):
        run("/unda")
    with pytest.raises(ChatError, match="/help lists them"):
        run("/xyzzy")
    with pytest.raises(commands.Leave):
        run("/exit")


@pytest.mark.parametrize(
    ("lines", "messages"),
    [
        (["a", "b"], ["a", "b"]),
        (["a\\", "b"], ["a\nb"]),
        (["a\\", "b\\", "", "c"], ["a\nb\n", "c"]),
        (['"""', "a", "", 'b"""', "c"], ["a\n\nb", "c"]),
        (['"""a\\', 'b"""'], ["a\\\nb"]),
        (['"""one"""'], ["one"]),
        (['say """x', "y"], ['say """x', "y"]),
        (['"""never closed', "x"], ["never closed\nx"]),
        (["ends with\\"], ["ends with"]),
        (['"""'], [""]),
        (['""""""'], [""]),
    ],
)
def test_lines_become_messages(lines: list[str], messages: list[str]) -> None:
    rest = iter(lines)

    def next_line(_: str) -> str:
        try:
            return next(rest)
        except StopIteration:
            raise EOFError from None

    reader, found = LineReader(next_line), []
    while True:
        try:
            found.append(reader.read())
        except EOFError:
            break
    assert found == messages


def test_a_block_is_open_until_three_quotes_end_it() -> None:
    assert [is_open(text) for text in ('"""', '"""a', '"""a"""', '""""', 'a"""', "", '"""a"""b', ' """a\n""" ')] == [
        True,
        True,
        False,
        True,
        False,
        False,
        True,
        False,
    ]
    assert unquote('"""\na\n"""') == "a"
    assert unquote(' "a" ') == ' "a" '
