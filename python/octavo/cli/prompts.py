"""Where prompts of a command come from: options, files, standard input."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

from octavo.cli.terminal import is_terminal
from octavo.errors import ParameterError

STDIN: Final = Path("-")


def read_prompts(given: list[str], files: list[Path], by_line: bool) -> list[str]:
    """All prompts, in the order given: those of options, then those of files.

    Args:
        given: prompts of the command line.
        files: a `.jsonl` has a prompt in each line, any other is one prompt; `-` is standard input, which is also read if
            there is nothing else and it is no terminal.
        by_line: each line of any file that is not blank is a prompt, as it stands.

    Raises:
        ParameterError: there is none, or a file cannot be read.
    """
    prompts = list(given)
    # A closed standard input is None.
    if not prompts and not files and sys.stdin is not None and not is_terminal(sys.stdin):
        files = [STDIN]
    for path in files:
        text = _read(path)
        if path.suffix == ".jsonl":
            # Not splitlines(): JSON strings may hold other separators of lines.
            prompts += [_json_line(path, number, line) for number, line in _lines(text)]
        elif by_line:
            prompts += [line for _, line in _lines(text)]
        elif text or path != STDIN:
            prompts.append(text.removesuffix("\n") if path == STDIN else text)
    if not prompts:
        raise ParameterError("prompt", None, "given: use -p TEXT, -f FILE, or pipe text in")
    return prompts


def _read(path: Path) -> str:
    shown = "standard input" if path == STDIN else str(path)
    try:
        if path == STDIN:
            return "" if sys.stdin is None else sys.stdin.buffer.read().decode()
        # As it stands: no translation of line ends.
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError("file", shown, f"a readable UTF-8 file ({error})") from error


def _lines(text: str) -> list[tuple[int, str]]:
    lines = (line.removesuffix("\r") for line in text.split("\n"))
    return [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def _json_line(path: Path, number: int, line: str) -> str:
    """A line is an object with `prompt`, a JSON string, or plain text."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        if line.lstrip().startswith("{"):
            raise ParameterError("file", str(path), f"of valid JSON in line {number} ({error})") from error
        return line
    if isinstance(value, dict):
        value = value.get("prompt")
    if not isinstance(value, str):
        allowed = f"lines of text, JSON strings or objects with 'prompt'; line {number} is {line[:60]!r}"
        raise ParameterError("file", str(path), allowed)
    return value
