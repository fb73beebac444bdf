"""The command `octavo chat` and its loop: read a message, stream the answer, say what it took."""

from __future__ import annotations

import json
import signal
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from octavo.cli.chat.view import AnswerView
from octavo.cli.options import engine_options, sampling_options
from octavo.cli.terminal import columns, dim, fits, is_terminal, wrap_parts, write
from octavo.config import EngineConfig
from octavo.errors import EngineError, ModelError, OctavoError, ParameterError
from octavo.outputs import MessageDelta
from octavo.sampling_params import SamplingParams


@engine_options
@sampling_options
def chat(
    config: EngineConfig,
    sampling: dict[str, Any],
    model: str | None = typer.Argument(None, help="Model: built-in name, hub id, folder or .gguf file."),
    system: str | None = typer.Option(None, "--system", help="System message."),
    context_shift: bool = typer.Option(
        False, "--context-shift", help="When the context is full, forget the oldest messages instead of stopping."
    ),
    tools: Path | None = typer.Option(
        None, "--tools", help="JSON file with a list of functions the model may call, in OpenAI's form."
    ),
    think: str | None = typer.Option(
        None, "--think", help="How much the model thinks: on or off, or low, medium or high; as its template has it."
    ),
) -> None:
    """Talk to a model.

    Ctrl-C stops an answer, not the chat; Ctrl-D leaves. /help lists the commands of a chat, such as /set temperature 0.3,
    /regen, /undo, /save FILE. Several lines: end a line with a backslash, or put them between three quotes.

    \b
    Examples:
      octavo chat
      octavo chat org/name --system "Answer in one sentence." --temperature 0.3
      octavo chat path/to/model.gguf --max-model-len 4096
      octavo chat org/name --think off --tools functions.json
      printf 'What is 2+2?\\nAnd 3+3?\\n' | octavo chat --temperature 0

    What a model thinks before its answer is dimmed. A call of a function is shown, not run: /result TEXT gives its result.

    Piped input is one message a line; only answers are written to standard output, without the thinking.

    Exit code: 0, or 1 if a piped message had no answer, 2 if an argument is wrong, 130 after Ctrl-C.
    """
    SamplingParams(**sampling)  # wrong values are told before the model is loaded
    functions = None if tools is None else _read_tools(tools)
    interactive = is_terminal(sys.stdin) and is_terminal(sys.stdout)
    config.disable_log_stats = True
    if interactive:
        write(dim(f"loading {config.model} ...", sys.stdout) + "\n", raw=True)
    from octavo.cli.chat.reader import make_reader  # noqa: PLC0415
    from octavo.cli.chat.session import ChatSession  # noqa: PLC0415
    from octavo.llm import LLM  # noqa: PLC0415  loads torch

    with LLM.from_config(config) as llm:
        _require_template(llm, config.model, functions)
        session = ChatSession(llm.engine, config.model, sampling, system, context_shift, functions)
        session.set_thinking(think)
        session.params().validate_for(llm.engine.vocab_size, config.max_logprobs)
        loop = ChatLoop(session, make_reader(interactive), interactive)
        with _terminated_cleanly():
            raise typer.Exit(loop.run())


def _read_tools(path: Path) -> list[dict[str, Any]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ParameterError("tools", str(path), f"a readable JSON file ({error})") from error
    if not isinstance(found, list) or not all(isinstance(tool, dict) and "function" in tool for tool in found):
        allowed = 'a file with a list of {"type": "function", "function": {"name": …}}'
        raise ParameterError("tools", str(path), allowed)
    return found


def _require_template(llm: Any, model: str, tools: list[dict[str, Any]] | None) -> None:
    try:
        llm.engine.render_chat([{"role": "user", "content": "Hi"}], tools=tools)
    except ParameterError as error:
        if error.param == "chat_template":
            raise ModelError(
                f"{model} has no chat template, so it is probably a base model: complete texts with "
                f"`octavo generate {model} -p TEXT`, or pass --chat-template FILE"
            ) from error
        if error.param in ("skip_tokenizer_init", "tools"):
            raise


class ChatLoop:
    """Reads messages until there are no more.

    Args:
        session: the conversation.
        reader: where messages come from.
        interactive: whether a person sits at a terminal.
    """

    def __init__(self, session: Any, reader: Any, interactive: bool) -> None:
        from octavo.cli.chat.commands import Context  # noqa: PLC0415

        self._session = session
        self._reader = reader
        self._interactive = interactive
        self._failed = False
        self._context = Context(session, self._tell, self._answer)
        # What a terminal of another encoding can show.
        self._separator = " · " if fits("·", sys.stdout) else " | "

    def run(self) -> int:
        """Returns the exit code."""
        from octavo.cli.chat.commands import Leave  # noqa: PLC0415

        if self._interactive:
            size = f"context {self._session.engine.max_model_len:,} tokens"
            self._note([self._session.model, size, "/help", "Ctrl-D leaves"])
        armed = False
        while True:
            try:
                message = self._reader.read()
                armed = False
                self._handle(message)
            except (EOFError, Leave):
                return 1 if self._failed and not self._interactive else 0
            except KeyboardInterrupt:
                if armed or not self._interactive:
                    return 130
                armed = True
                self._tell("Ctrl-C again or Ctrl-D to leave")
            except EngineError:
                raise
            except OctavoError as error:
                self._fail(error)

    def _handle(self, message: str) -> None:
        from octavo.cli.chat import commands  # noqa: PLC0415

        if not message.strip():
            return
        if message.startswith("/") and not message.startswith("//"):
            commands.run(message.rstrip(), self._context)
            return
        text = message.removeprefix("/") if message.startswith("//") else message
        self._answer(lambda show: self._session.ask(text, show))

    def _answer(self, stream: Callable[[Callable[[MessageDelta], None]], Any]) -> None:
        """Shows an answer as it is written; Ctrl-C stops it."""
        view = AnswerView(sys.stdout)
        with _on_interrupt(self._session.interrupt), _no_echo(self._interactive):
            try:
                stats = stream(view.show)
            finally:
                view.finish()
        if self._interactive:
            self._note(self._summary(stats))
            for call in self._session.pending_calls()[:1]:
                self._tell(f"/result TEXT gives the result of {call['function']['name']}")

    def _summary(self, stats: Any) -> list[str]:
        """What an answer took, the most important first."""
        left = max(stats.context_size - stats.context_used, 0)
        parts = [f"{stats.output_tokens:,} tokens"]
        if stats.tokens_per_second is not None:
            parts.append(f"{stats.tokens_per_second:,.1f}/s")
        parts += [
            f"TTFT {stats.ttft:.2f} s",
            f"cached {stats.cached_tokens:,}/{stats.prompt_tokens:,}",
            f"context {stats.context_used:,}, {left:,} left",
        ]
        if stats.finish_reason == "abort":
            parts.insert(0, "stopped")
        elif stats.finish_reason == "length":
            parts.insert(0, "context full: /undo or /clear" if left <= 1 else "cut at max_tokens")
        if stats.dropped_messages:
            parts.insert(0, f"forgot the oldest {stats.dropped_messages} messages")
        return parts

    def _note(self, parts: list[str]) -> None:
        for line in wrap_parts(parts, columns(), self._separator):
            write(dim(line, sys.stdout) + "\n", raw=True)

    def _tell(self, text: str) -> None:
        """What a command says: to a person on the terminal; in a pipe only answers go to standard output."""
        write(f"{text}\n", None if self._interactive else sys.stderr)

    def _fail(self, error: OctavoError) -> None:
        self._failed = True
        # What was given is before the user's eyes.
        text = f"{error.param} must be {error.allowed}" if isinstance(error, ParameterError) else str(error)
        write(f"octavo: {' '.join(text.splitlines())}\n", sys.stdout if self._interactive else sys.stderr)


@contextmanager
def _on_interrupt(act: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C calls `act`, and nothing else."""
    before = signal.signal(signal.SIGINT, lambda *_: act())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _terminated_cleanly() -> Iterator[None]:
    """SIGTERM and SIGHUP leave through every `finally`, so that the terminal is as it was."""

    def leave(number: int, _: object) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _no_echo(enabled: bool) -> Iterator[None]:
    """Keys typed meanwhile are kept for the next prompt, and do not show among the answer."""
    if not enabled:
        yield
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    quiet = termios.tcgetattr(descriptor)
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(descriptor, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)
