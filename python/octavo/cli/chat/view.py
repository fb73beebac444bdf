"""Shows an answer as it grows: reasoning dimmed, calls of functions as calls."""

from __future__ import annotations

from typing import Literal, TextIO

from octavo.cli.terminal import dim, is_terminal, printable, shows_style, write
from octavo.outputs import MessageDelta, ToolCallDelta

_Part = Literal["reasoning", "content", "call"]


class AnswerView:
    """Writes one answer.

    Reasoning goes to terminals only: dimmed, or under a heading where there is no style.

    Args:
        stream: where the answer goes.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._part: _Part | None = None
        self._line_open = False

    def show(self, delta: MessageDelta) -> None:
        """Writes what is added to the message."""
        if delta.reasoning_content and is_terminal(self._stream):
            self._begin("reasoning")
            self._write(delta.reasoning_content, dimmed=True)
        if delta.content:
            self._begin("content")
            self._write(delta.content)
        if delta.tool_call is not None:
            self._call(delta.tool_call)

    def finish(self) -> None:
        """Ends what is open."""
        if self._part == "call":
            self._write(")")
        if self._line_open or not is_terminal(self._stream):
            self._write("\n")

    def _call(self, call: ToolCallDelta) -> None:
        if call.name is not None:
            if self._part == "call":
                self._write(")")
            self._begin("call", anew=True)
            self._write(f"call: {call.name}(")
        self._write(call.arguments)

    def _begin(self, part: _Part, anew: bool = False) -> None:
        """Makes room before a part; calls and headings have lines of their own."""
        if part == self._part and not anew:
            return
        if self._part == "call" and part != "call":
            self._write(")")
        if self._line_open:
            self._write("\n")
        if self._part == "reasoning":
            self._write("\n")
        if not shows_style(self._stream):
            if part == "reasoning":
                self._write("thinking:\n")
            elif self._part == "reasoning" and part == "content":
                self._write("answer:\n")
        self._part = part

    def _write(self, text: str, dimmed: bool = False) -> None:
        if not text:
            return
        shown = printable(text, self._stream)
        write(dim(shown, self._stream) if dimmed else shown, self._stream, raw=True)
        self._line_open = not text.endswith("\n")
