"""Reads a batch's input: one request a line, never the whole file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn

from octavo.batch.bodies import ChatBody, CompletionBody, parse_chat_body, parse_completion_body
from octavo.batch.replies import error_body, error_reply
from octavo.errors import ParameterError, check_text
from octavo.sampling_params import SamplingParams

MAX_LINE_BYTES: Final = 64 << 20
"""Bytes of a line at most."""

CHAT_URL: Final = "/v1/chat/completions"
COMPLETION_URL: Final = "/v1/completions"
_PARSERS: Final = {CHAT_URL: parse_chat_body, COMPLETION_URL: parse_completion_body}
_FIELDS: Final = ("custom_id", "method", "url", "body")


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the input: a request, or why it is none."""

    line: int
    custom_id: str | None
    body: ChatBody | CompletionBody | None
    error: tuple[int, dict[str, Any]] | None = None
    """Status and body of the error."""

    @property
    def result_id(self) -> str:
        """What this line's result is called; the same in every run."""
        return f"batch_req_{self.line}"


@dataclass(frozen=True, slots=True)
class Defaults:
    """What requests get that say nothing."""

    chat: SamplingParams
    completion: SamplingParams


def count_lines(path: Path) -> int:
    """Lines of the file, blank ones included."""
    lines, last = 0, b"\n"
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            lines += chunk.count(b"\n")
            last = chunk[-1:]
    return lines + (last != b"\n")


def read_entries(file: BinaryIO, defaults: Defaults) -> Iterator[Entry]:
    """Yields the lines of a batch in order; blank ones are left out. A second use of a `custom_id` is an error."""
    seen: set[str] = set()
    for number, line in _lines(file):
        if line is not None and not line.strip():
            continue
        entry = _entry(number, line, defaults)
        name = entry.custom_id
        if name is not None:
            if name in seen:
                message = f"line {number}: custom_id {name!r} is used by an earlier line"
                entry = Entry(number, name, None, (400, error_body(message, "custom_id", "duplicate_custom_id")))
            seen.add(name)
        yield entry


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Lines with their numbers, from 1; `None` for one that is too long, whose rest is skipped."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) <= MAX_LINE_BYTES:
            yield number, line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(1 << 20)
        yield number, None


def _entry(number: int, line: bytes | None, defaults: Defaults) -> Entry:
    custom_id: str | None = None
    try:
        value = _json(line)
        given = value.get("custom_id")
        if not isinstance(given, str) or not given:
            raise ParameterError("custom_id", given, "a non-empty string")
        custom_id = check_text("custom_id", given)
        return Entry(number, custom_id, _body(value, defaults))
    except ParameterError as error:
        return Entry(number, custom_id, None, line_error(number, error))


def line_error(number: int, error: Exception) -> tuple[int, dict[str, Any]]:
    """`error_reply` with the number of the line in its message."""
    status, body = error_reply(error)
    body["error"]["message"] = f"line {number}: {body['error']['message']}"
    return status, body


def _json(line: bytes | None) -> dict[str, Any]:
    if line is None:
        raise ParameterError("line", f"more than {MAX_LINE_BYTES} bytes", f"at most {MAX_LINE_BYTES >> 20} MiB long")
    try:
        value = json.loads(line.decode(), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        shown = line[:60].decode("utf-8", "replace").strip()
        raise ParameterError("line", shown, f"valid JSON in UTF-8 ({error})") from error
    if not isinstance(value, dict):
        raise ParameterError("line", value, "a JSON object")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _body(value: dict[str, Any], defaults: Defaults) -> ChatBody | CompletionBody:
    for name, given in value.items():
        if name not in _FIELDS:
            raise ParameterError(name, given, f"left out: the fields of a line are {', '.join(_FIELDS)}")
    if value.get("method", "POST") != "POST":
        raise ParameterError("method", value["method"], "'POST'")
    url = value.get("url")
    if not isinstance(url, str) or url not in _PARSERS:
        raise ParameterError("url", url, f"one of {', '.join(_PARSERS)}")
    body = value.get("body")
    parsed = (
        parse_chat_body(_object(body), defaults.chat)
        if url == CHAT_URL
        else parse_completion_body(_object(body), defaults.completion)
    )
    if parsed.stream:
        raise ParameterError("stream", True, "false in a batch")
    return parsed


def _object(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise ParameterError("body", body, "a JSON object")
    return body
