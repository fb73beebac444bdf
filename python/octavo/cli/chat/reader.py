"""Where the user's messages come from: a line editor on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

from octavo.cli.chat.commands import COMMANDS
from octavo.cli.chat.session import SETTABLE
from octavo.errors import ParameterError

PROMPT: Final = ">>> "
CONTINUATION: Final = "... "
QUOTES: Final = '"""'


class Reader(Protocol):
    """Reads one message at a time."""

    def read(self) -> str:
        """The next message, without the marks of its several lines.

        Raises:
            EOFError: there is none.
            KeyboardInterrupt: Ctrl-C on an empty line.
            ParameterError: what came is no text.
        """


def is_open(text: str) -> bool:
    """Whether a block that begins with three quotes still lacks the three that end it."""
    begun = text.lstrip()
    return begun.startswith(QUOTES) and not (len(begun.rstrip()) >= 6 and begun.rstrip().endswith(QUOTES))


def unquote(text: str) -> str:
    """The text inside the quotes of a block, as it stands; any other text is left alone."""
    begun = text.strip()
    if not begun.startswith(QUOTES):
        return text
    return begun[3:].removesuffix(QUOTES).strip("\n")


class LineReader:
    """Joins lines to messages: a backslash at the end of a line, or three quotes around the text.

    Args:
        next_line: gives a line without its end for a prompt; raises EOFError at the end.
    """

    def __init__(self, next_line: Callable[[str], str]) -> None:
        self._next_line = next_line

    def read(self) -> str:
        """The next message."""
        text = self._next_line(PROMPT)
        try:
            while True:
                if is_open(text):
                    text = f"{text}\n{self._next_line(CONTINUATION)}"
                elif not text.lstrip().startswith(QUOTES) and text.endswith("\\"):
                    text = f"{text[:-1]}\n{self._next_line(CONTINUATION)}"
                else:
                    break
        except EOFError:
            text = text.removesuffix("\\")
        return unquote(text)


def piped_line(_: str) -> str:
    """A line of a standard input that is no terminal."""
    if sys.stdin is None:
        raise EOFError
    line = sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    try:
        return line.decode(sys.stdin.encoding).removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise ParameterError("standard input", line[:60], f"text in {sys.stdin.encoding} ({error.reason})") from error


def make_reader(interactive: bool) -> Reader:
    """The best reader there is."""
    if not interactive:
        return LineReader(piped_line)
    history = history_path()
    if os.environ.get("TERM") != "dumb":
        try:
            return EditorReader(history)
        except ImportError:
            pass
    return _readline_reader(history)


def history_path() -> Path | None:
    """The file of earlier messages, made if need be; `None` if it cannot be written."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    path = Path(base) / "octavo" / "chat_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # What one writes to a model is private.
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError:
        return None
    return path


def _readline_reader(history: Path | None) -> LineReader:
    """`input`, with editing and history where Python has readline."""
    try:
        import atexit  # noqa: PLC0415
        import readline  # noqa: PLC0415
    except ImportError:
        return LineReader(input)
    if history is not None:
        name = history.with_name("chat_history_readline")
        if name.exists():
            readline.read_history_file(name)
        readline.set_history_length(2000)
        atexit.register(readline.write_history_file, name)
    return LineReader(input)


class EditorReader:
    """A line editor of several lines, with history, completion of commands, and pastes taken as they are.

    Raises:
        ImportError: prompt_toolkit is not installed.
    """

    def __init__(self, history: Path | None) -> None:
        from prompt_toolkit import PromptSession  # noqa: PLC0415
        from prompt_toolkit.history import FileHistory, InMemoryHistory  # noqa: PLC0415
        from prompt_toolkit.shortcuts import CompleteStyle  # noqa: PLC0415

        self._session: Any = PromptSession(
            history=InMemoryHistory() if history is None else FileHistory(str(history)),
            multiline=True,
            key_bindings=_bindings(),
            completer=_completer(),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            prompt_continuation=CONTINUATION,
            enable_suspend=True,
            reserve_space_for_menu=0,
        )

    def read(self) -> str:
        """The next message."""
        return unquote(self._session.prompt(PROMPT))


def _bindings() -> Any:
    """Enter sends, unless the text goes on; a backslash before it makes a new line, as Alt-Enter does."""
    from prompt_toolkit.enums import DEFAULT_BUFFER  # noqa: PLC0415
    from prompt_toolkit.filters import has_focus  # noqa: PLC0415
    from prompt_toolkit.key_binding import KeyBindings  # noqa: PLC0415

    bindings = KeyBindings()
    editing = has_focus(DEFAULT_BUFFER)

    @bindings.add("enter", filter=editing)
    def _enter(event: Any) -> None:
        buffer = event.current_buffer
        before = buffer.document.text_before_cursor
        # Only what is typed goes on like this: pasted text is never changed.
        if before.endswith("\\") and buffer.document.is_cursor_at_the_end and not before.lstrip().startswith(QUOTES):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        elif is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter", filter=editing)
    def _newline(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("c-c", filter=editing)
    def _cancel(event: Any) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    return bindings


def _completer() -> Any:
    from prompt_toolkit.completion import Completer, Completion  # noqa: PLC0415

    class CommandCompleter(Completer):
        """Names of commands, and of parameters after /set."""

        def get_completions(self, document: Any, complete_event: Any) -> Any:
            text = document.text
            if text.startswith("/set ") and text.count(" ") == 1:
                word, names = text[5:], SETTABLE
            elif text.startswith("/") and " " not in text:
                word, names = text[1:], COMMANDS
            else:
                return
            for name in names:
                if name.startswith(word):
                    yield Completion(name, start_position=-len(word))

    return CommandCompleter()
