"""The commands of a chat: lines that begin with a slash."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from octavo.cli.chat.session import SETTABLE, AnswerStats, ChatError, ChatSession, Show

HELP: Final = """\
/help                     this list
/clear                    start anew; the system message and settings stay
/system TEXT              set the system message; without TEXT show it, "" removes it
/set NAME VALUE           a sampling parameter, as in: /set temperature 0.3 (VALUE default: as before)
/show                     model, settings and messages
/think VALUE              how much the model thinks, as in: /think off (VALUE default: as before)
/result TEXT              the result of a call that the model asked for
/tokens                   how much of the context is used
/regen                    write the last answer anew
/undo                     take back your last message and its answer
/save FILE, /load FILE    keep a conversation as JSON, and go on with it
/exit                     leave (also Ctrl-D, or Ctrl-C twice)

Several lines: end a line with \\, or put the text between \"\"\" and \"\"\"; a paste stays one message.
Ctrl-C stops an answer. A message that begins with a slash: write // first."""


class Leave(Exception):  # noqa: N818  no error
    """The user wants to leave."""


@dataclass(frozen=True, slots=True)
class Context:
    """What commands act on."""

    session: ChatSession
    tell: Callable[[str], None]
    """Prints a note."""
    answer: Callable[[Callable[[Show], AnswerStats]], None]
    """Streams what the function given to it writes."""


def run(line: str, context: Context) -> None:
    """Runs a command line.

    Raises:
        Leave: the chat ends.
        OctavoError: the command is unknown or cannot be done.
    """
    name, _, rest = line[1:].partition(" ")
    command = _COMMANDS.get(name.lower())
    if command is None:
        close = get_close_matches(name.lower(), COMMANDS, 1)
        hint = f"did you mean /{close[0]}? " if close else ""
        raise ChatError(f"there is no command /{name}; {hint}/help lists them")
    command(context, rest.strip())


def _help(context: Context, _: str) -> None:
    context.tell(HELP)


def _clear(context: Context, _: str) -> None:
    context.session.clear()
    context.tell("a new conversation")


def _system(context: Context, text: str) -> None:
    session = context.session
    if text:
        session.system = None if text == '""' else text
    context.tell("no system message" if session.system is None else f"system: {session.system}")


def _set(context: Context, rest: str) -> None:
    session = context.session
    name, _, text = rest.partition(" ")
    name, text = name.replace("-", "_"), text.strip()
    if not name:
        context.tell(f"/set NAME VALUE, where NAME is one of {', '.join(SETTABLE)}")
        return
    if not text:
        raise ChatError(f"/set {name} needs a value, as in: /set temperature 0.3")
    if text == "default":
        session.unset(name)
    else:
        session.set(name, _value(name, text))
    context.tell(f"{name} = {_shown(getattr(session.params(), name))}")


def _value(name: str, text: str) -> Any:
    """A value as JSON; a text that is none stands for itself."""
    if name == "stop" and text[0] not in '["':
        return text
    try:
        value = json.loads({"none": "null", "True": "true", "False": "false"}.get(text, text))
    except (ValueError, RecursionError):
        return text
    if name == "logit_bias" and isinstance(value, dict):
        return {int(key) if key.isdecimal() else key: bias for key, bias in value.items()}
    return value


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _show(context: Context, _: str) -> None:
    session, params = context.session, context.session.params()
    lines = [f"model: {session.model}", f"system: {session.system or '(none)'}"]
    for name in SETTABLE:
        mark = "  (set)" if name in session.given else ""
        value = getattr(params, name)
        if mark or value not in (None, [], False):
            lines.append(f"{name} = {_shown(value)}{mark}")
    for message in session.messages:
        lines.append(f"[{message['role']}] {message['content'] or ''}".rstrip(" "))
        for call in message.get("tool_calls") or []:
            lines.append(f"call: {call['function']['name']}({call['function'].get('arguments', '')})")
    context.tell("\n".join(lines))


def _tokens(context: Context, _: str) -> None:
    session = context.session
    used, size = session.num_tokens(), session.engine.max_model_len
    context.tell(f"{used:,} of {size:,} tokens used, {max(size - used, 0):,} left; exchanges: {session.num_exchanges}")


def _think(context: Context, value: str) -> None:
    session = context.session
    if value:
        session.set_thinking(None if value == "default" else value)
    context.tell(f"think = {session.thinking or 'default'}")


def _result(context: Context, text: str) -> None:
    left = context.session.add_result(text)
    if left:
        context.tell(f"{left} more to answer: {context.session.pending_calls()[0]['function']['name']}")
    else:
        context.answer(context.session.go_on)


def _regen(context: Context, _: str) -> None:
    if context.session.given.get("seed") is not None:
        context.tell("the seed is set, so the answer will be the same; /set seed default draws another")
    context.answer(context.session.regenerate)


def _undo(context: Context, _: str) -> None:
    context.tell(f"taken back: {context.session.undo()}")


def _save(context: Context, rest: str) -> None:
    path = _path(rest, "/save")
    context.session.save(path)
    context.tell(f"saved: {path}")


def _load(context: Context, rest: str) -> None:
    path = _path(rest, "/load")
    context.session.load(path)
    context.tell(f"loaded: {path}, {len(context.session.messages)} messages")


def _path(text: str, command: str) -> Path:
    if not text:
        raise ChatError(f"{command} needs the name of a file, as in: {command} chat.json")
    return Path(text).expanduser()


def _exit(_context: Context, _: str) -> None:
    raise Leave


_COMMANDS: Final = {
    "help": _help,
    "?": _help,
    "clear": _clear,
    "system": _system,
    "set": _set,
    "show": _show,
    "think": _think,
    "result": _result,
    "tokens": _tokens,
    "regen": _regen,
    "undo": _undo,
    "save": _save,
    "load": _load,
    "exit": _exit,
    "quit": _exit,
    "bye": _exit,
}
COMMANDS: Final = tuple(name for name in _COMMANDS if name.isalpha())
"""Names, for completion."""
