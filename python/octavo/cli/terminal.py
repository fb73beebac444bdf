"""What commands must know of the terminal: is it one, how wide, may it be coloured, what can it show."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any, Final, TextIO

# Control characters but tab and line feed: a model's text must not move the cursor or speak to the terminal.
_CONTROLS: Final = {
    code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"
} | {ord("\r"): ""}


def is_terminal(stream: Any) -> bool:
    """Whether a standard stream is a terminal; one that was closed is `None`."""
    return stream is not None and bool(stream.isatty())


def shows_style(stream: Any) -> bool:
    """Whether escape codes may be written: to a terminal that knows them, unless `NO_COLOR` says not to."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def dim(text: str, stream: TextIO) -> str:
    """The text, faint where that is possible."""
    return f"\x1b[2m{text}\x1b[0m" if shows_style(stream) else text


def printable(text: str, stream: TextIO) -> str:
    """The text as it may be written: on a terminal, control characters are shown instead of obeyed."""
    return text.translate(_CONTROLS) if is_terminal(stream) else text


def fits(text: str, stream: TextIO) -> bool:
    """Whether the stream's encoding has all characters of the text."""
    try:
        text.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def wrap_parts(parts: list[str], width: int, separator: str) -> list[str]:
    """The parts in lines of less than `width` characters, broken between parts alone."""
    lines = [parts[0]]
    for part in parts[1:]:
        longer = lines[-1] + separator + part
        if len(longer) < width:
            lines[-1] = longer
        else:
            lines.append(part)
    return lines


def columns() -> int:
    """Width of the terminal now."""
    return shutil.get_terminal_size().columns


def write(text: str, stream: TextIO | None = None, *, raw: bool = False) -> None:
    """Writes at once; unless `raw`, control characters do not reach a terminal."""
    target = stream or sys.stdout
    target.write(text if raw else printable(text, target))
    target.flush()
