"""`octavo chat` in a real terminal: a pseudo-terminal, its keys and its screen."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from octavo import LLM
from tests.cli.conftest import EXACT, Terminal

Start = Callable[..., Terminal]
SHORT = ["--max-tokens", "12", "--ignore-eos", "--sampling-seed", "3"]


@pytest.fixture(scope="module")
def shared(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    """One chat for the tests that leave it as they found it."""
    state = tmp_path_factory.mktemp("state")
    one = Terminal(["chat", str(chat_model), *EXACT, *SHORT], {"XDG_STATE_HOME": str(state)})
    yield one
    one.kill()


@pytest.fixture
def chat(shared: Terminal) -> Terminal:
    """The shared chat with an empty conversation."""
    shared.enter("/clear")
    return shared


def token_of(llm: LLM, text: str) -> int:
    (token,) = llm.get_tokenizer().encode(text)
    return token


def test_an_answer_is_followed_by_what_it_took(chat: Terminal) -> None:
    shown = chat.enter("hello there")
    note = shown.splitlines()[-2]
    assert re.fullmatch(
        r"cut at max_tokens · 12 tokens · [\d.,]+/s · TTFT [\d.]+ s · cached \d+/\d+ · context \d+, [\d,]+ left", note
    )


def test_the_next_question_finds_the_conversation_in_the_cache(chat: Terminal) -> None:
    chat.enter("a question of more than sixteen tokens, so that a block is full")
    shown = chat.enter("and the next")
    assert int(re.search(r"cached (\d+)/", shown)[1]) >= 32  # type: ignore[index]


def test_lines_can_be_joined_in_four_ways(chat: Terminal) -> None:
    for keys, expected in (
        ('"""first\rsecond\\\r"""\r', "first\nsecond\\"),
        ("third\\\rfourth\r", "third\nfourth"),
        ("fifth\x1b\rsixth\r", "fifth\nsixth"),
        ('\x1b[200~if x:\\\r\n\r\n    \'"""y\'\r\x1b[201~\r', 'if x:\\\n\n    \'"""y\'\n'),
    ):
        chat.enter("/clear")
        chat.prompt()
        chat.send(keys)
        chat.wait_for(" left")
        shown = chat.enter("/show")
        assert f"[user] {expected}".rstrip() in shown
        chat.enter("/undo")
        assert "exchanges: 0" in chat.enter("/tokens")


def test_a_model_cannot_speak_to_the_terminal(chat: Terminal, small_llm: LLM) -> None:
    escape, bell = token_of(small_llm, "\x1b"), token_of(small_llm, "\x07")
    chat.enter(f"/set allowed_token_ids [{escape}, {bell}]")
    chat.raw = b""
    shown = chat.enter("hello")
    chat.enter("/set allowed_token_ids default")
    assert r"\x1b" in shown
    assert r"\x07" in shown
    assert b"\x07" not in chat.raw
    assert b"\x1b\x1b" not in chat.raw


def test_commands_answer_and_wrong_ones_say_what_is_right(chat: Terminal) -> None:
    assert "/regen" in chat.enter("/help")
    assert "did you mean /clear?" in chat.enter("/claer")
    assert "temperature must be from 0 to 1e+06" in chat.enter("/set temperature -1")
    assert "temperature = 0.5" in chat.enter("/set temperature 0.5")
    assert "temperature = 0.5  (set)" in chat.enter("/show")
    assert "temperature = 1.0" in chat.enter("/set temperature default")
    assert "one of presence_penalty" in chat.enter("/set colour blue")


def test_tab_completes_commands(chat: Terminal) -> None:
    chat.prompt()
    chat.send("/reg\t")
    chat.wait(lambda: chat.line == ">>> /regen", "completion")
    chat.send("\x03")
    chat.prompt()


def test_ctrl_c_stops_the_answer_and_keeps_its_text_and_its_cache(terminal: Start, small_llm: LLM) -> None:
    chat = terminal("--ignore-eos")
    letter = token_of(small_llm, "q")
    chat.enter(f"/set allowed_token_ids [{letter}]")
    chat.prompt()
    chat.send("hello\r")
    chat.wait_for("qqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqq")
    chat.send("\x03")
    chat.wait_for("stopped · ")
    chat.prompt()
    assert "^C" not in chat.text
    chat.enter("/set max_tokens 3")
    shown = chat.enter("again")
    cached, prompt = map(int, re.search(r"cached (\d+)/(\d+)", shown).groups())  # type: ignore[union-attr]
    assert cached >= 32
    assert prompt - cached < 60
    assert re.search(r"\[assistant\] q{48}", chat.enter("/show").replace("\n", ""))
    chat.send("\x03")
    chat.wait_for("Ctrl-C again")
    chat.send("\x03")
    assert chat.end() == 130


def test_what_is_typed_during_an_answer_waits_for_the_next_prompt(terminal: Start) -> None:
    chat = terminal("--ignore-eos", "--max-tokens", "300", "--sampling-seed", "3")
    chat.prompt()
    chat.send("hello\r")
    chat.wait(lambda: len(chat.text.splitlines()) > 3, "answer")
    chat.send("typed meanwhile")
    chat.wait_for(">>> typed meanwhile")
    assert chat.text.count("typed meanwhile") == 1


def test_in_a_window_that_shrinks_notes_take_more_lines_and_the_chat_goes_on(terminal: Start) -> None:
    chat = terminal(*SHORT)
    chat.enter("hello")
    chat.resize(30, 34)
    chat.prompt()
    chat.send("one more\r")
    chat.wait_for("12 tokens")
    chat.prompt()
    # Broken between its parts only.
    assert re.search(
        r"\ncut at max_tokens · 12 tokens\n[\d.,]+/s · TTFT [\d.]+ s\ncached \d+/\d+\ncontext \d+, [\d,]+ left\n>>>$",
        chat.text,
    )
    chat.resize(40, 120)
    assert " left" in chat.enter("wide again")


def test_history_comes_back_in_the_next_chat_and_is_private(terminal: Start, tmp_path: Path) -> None:
    first = terminal(*SHORT)
    first.enter("remember this line")
    first.send("\x04")
    assert first.end() == 0
    second = terminal(*SHORT)
    second.prompt()
    second.send("\x1b[A")
    second.wait(lambda: second.line == ">>> remember this line", "earlier message")
    assert (tmp_path / "octavo" / "chat_history").stat().st_mode & 0o77 == 0


def test_without_colour_nothing_is_styled(terminal: Start) -> None:
    chat = terminal(*SHORT, NO_COLOR="1")
    chat.enter("hello")
    styles = {code for codes in re.findall(rb"\x1b\[([\d;]+)m", chat.raw) for code in codes.split(b";")}
    assert styles <= {b"0"}


def test_a_terminal_without_utf8_gets_what_it_can_show(terminal: Start) -> None:
    chat = terminal(*SHORT, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    shown = chat.enter("hello")
    assert "12 tokens | " in shown
    assert all(ord(character) < 128 for character in shown)


def test_a_dumb_terminal_and_a_read_only_home_are_enough(terminal: Start) -> None:
    chat = terminal(*SHORT, TERM="dumb", XDG_STATE_HOME="/proc/nowhere")
    chat.prompt()
    chat.send("one\\\r")
    chat.wait(lambda: chat.line == "...", "continuation")
    chat.send("two\r")
    chat.wait_for("12 tokens")
    chat.send("/show\r")
    chat.wait_for("[user] one\ntwo")


def test_a_terminated_chat_leaves_the_terminal_as_it_was(terminal: Start) -> None:
    chat = terminal("--ignore-eos")
    chat.prompt()
    chat.send("hello\r")
    chat.wait(lambda: not chat.child.getecho() and chat.line != ">>> hello", "answer")
    os.kill(chat.child.pid, signal.SIGTERM)
    assert chat.end() == 128 + signal.SIGTERM
