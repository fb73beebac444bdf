"""How a model writes messages: which parsers read its reasoning and its tool calls, and what becomes of its text.

Told by the chat template, or by the engine's `tool_call_parser` and `reasoning_parser`.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from octavo._core import GrammarSource, OutputParser, Tokenizer, ToolSchemas
from octavo.errors import ParameterError
from octavo.outputs import MessageDelta, ToolCallDelta

if TYPE_CHECKING:
    from octavo._core import OutputEvent

AUTO: Final = "auto"
NONE: Final = "none"
# Other engines' names of the same formats.
_ALIASES: Final = {
    "openai": "harmony",
    "qwen3_xml": "qwen3_coder",
    "deepseek_v31": "deepseek_v3",
    "openai_gptoss": "gpt_oss",
}


def check_parsers(tool_call_parser: str, reasoning_parser: str) -> tuple[str, str]:
    """The names as octavo has them.

    Raises:
        ParameterError: there is no such parser, or the two exclude each other.
    """
    tool = _checked("tool_call_parser", tool_call_parser, OutputParser.tool_parsers())
    reasoning = _checked("reasoning_parser", reasoning_parser, OutputParser.reasoning_parsers())
    if tool not in (AUTO, NONE) and reasoning not in (AUTO, NONE):
        try:
            OutputParser(tool, reasoning)
        except ValueError as error:
            raise ParameterError("reasoning_parser", reasoning, f"one that goes with the other ({error})") from error
    return tool, reasoning


def _checked(param: str, given: str, known: list[str]) -> str:
    name = _ALIASES.get(given, given)
    if name not in (AUTO, NONE, *known):
        raise ParameterError(param, given, "one of " + ", ".join((AUTO, NONE, *known)))
    return name


@dataclass(frozen=True, slots=True)
class ThinkingSwitch:
    """The argument by which a template turns reasoning on and off, or sets how much of it there is."""

    name: str
    values: Mapping[str, Any]
    """What users say, and what the template gets for it."""


def thinking_switch(template: str) -> ThinkingSwitch | None:
    """The switch of a chat template, told by the variable that its source asks for."""
    if "enable_thinking" in template:
        return ThinkingSwitch("enable_thinking", {"on": True, "off": False})
    if re.search(r"\bthinking is (not )?defined\b|\bif (not )?thinking\b", template):
        return ThinkingSwitch("thinking", {"on": True, "off": False})
    if "reasoning_effort" in template:
        return ThinkingSwitch("reasoning_effort", {name: name for name in ("low", "medium", "high")})
    return None


@dataclass(frozen=True, slots=True)
class Tools:
    """What a request says of tools."""

    told: str | None = None
    """Those that the model is told of, as JSON; without any, what looks like a call is content."""
    must_call: bool = False
    """Whether the answer must be a call."""
    name: str | None = None
    """The function that must be called, if it is a certain one."""
    several: bool = True
    """Whether a forced answer may have more than one call."""


class ChatFormat:
    """What a chat template says of the messages that its model writes.

    Args:
        template: its source.
        tool_call_parser: name of the parser, `auto` for what the template calls for, `none` for no parser.
        reasoning_parser: the same for the reasoning.
    """

    def __init__(self, template: str, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO) -> None:
        tool, reasoning = OutputParser.detect(template)
        # One format of calls and reasoning; what is found goes with what is given.
        if tool_call_parser not in (AUTO, NONE) and (tool_call_parser == "harmony") != (reasoning == "gpt_oss"):
            reasoning = "gpt_oss" if tool_call_parser == "harmony" else None
        if reasoning_parser not in (AUTO, NONE) and (reasoning_parser == "gpt_oss") != (tool == "harmony"):
            tool = "harmony" if reasoning_parser == "gpt_oss" else None
        self.tool_parser = _chosen(tool_call_parser, tool)
        self.reasoning_parser = _chosen(reasoning_parser, reasoning)
        self.reads_tools = self.tool_parser is not None or tool_call_parser == NONE
        """Whether calls are read, or it was said that they need not be."""
        self.writes_tools = "tools" in template
        """Whether the template tells the model of tools."""
        self.thinking = thinking_switch(template)

    def answer(self, tokenizer: Tokenizer, tools: Tools, reasoning_open: bool, continued: bool) -> AnswerFormat:
        """How the answer to one prompt is read.

        Args:
            tokenizer: knows which markers are special tokens.
            tools: the tools that the model was told of.
            reasoning_open: whether the prompt ends inside the reasoning.
            continued: whether the prompt ends inside the model's own message.
        """
        tool = self.tool_parser if tools.told is not None else None
        reasoning = self.reasoning_parser
        if continued and reasoning == "deepseek_r1":
            # Of this format all begins with reasoning, but for a message that is past it.
            reasoning = "qwen3"
        parser = OutputParser(tool, reasoning, reasoning_open)
        schemas = None if tools.told is None else ToolSchemas(tools.told)
        return AnswerFormat(tool, reasoning, reasoning_open, schemas, tuple(parser.special_ids(tokenizer)), tools)


def _chosen(given: str, found: str | None) -> str | None:
    return found if given == AUTO else None if given == NONE else given


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How the choices of one request become messages."""

    tool_parser: str | None
    reasoning_parser: str | None
    reasoning_open: bool
    schemas: ToolSchemas | None
    shown_special_ids: tuple[int, ...]
    """Special tokens that must stay in the text, because the parsers read them."""
    tools: Tools = field(default_factory=Tools)

    def grammar(self, tokenizer: Tokenizer, options: str | None) -> GrammarSource:
        """The grammar of an answer that must be of a form, or a call; reasoning comes before it.

        Args:
            tokenizer: of the model.
            options: normal form of `StructuredOutputsParams`; a forced call leaves no room for an answer that it could hold for.

        Raises:
            ParameterError: calls in this format cannot be forced.
        """
        tools = self.tools
        make = partial(
            GrammarSource.make,
            tokenizer,
            options=None if tools.must_call else options,
            reasoning_parser=self.reasoning_parser,
            reasoning_open=self.reasoning_open,
        )
        source = make(tools=tools.told, name=tools.name, several=tools.several, tool_parser=self.tool_parser)
        if source is None and not tools.must_call:
            source = make()
        if source is None:
            allowed = "'auto' or 'none': calls in the format of this model's chat template cannot be forced"
            raise ParameterError("tool_choice", self.tool_parser, allowed)
        return source

    def reader(self) -> MessageReader:
        """A reader for one choice."""
        parser = OutputParser(self.tool_parser, self.reasoning_parser, self.reasoning_open, self.schemas)
        return MessageReader(parser, nine_letters=self.tool_parser == "mistral")


class MessageReader:
    """Makes what is to be added to a message of the growing text of one choice.

    Args:
        parser: new, for this choice alone.
        nine_letters: make ids of calls that Mistral's templates accept in a later turn.
    """

    def __init__(self, parser: OutputParser, nine_letters: bool = False) -> None:
        self._parser = parser
        self._nine_letters = nine_letters

    def push(self, text: str) -> list[MessageDelta]:
        """Appends text."""
        return self._deltas(self._parser.push(text)) if text else []

    def finish(self) -> list[MessageDelta]:
        """Ends the text: what was held back comes out."""
        return self._deltas(self._parser.finish())

    def _deltas(self, events: list[OutputEvent]) -> list[MessageDelta]:
        return [delta for event in events if (delta := self._delta(event)) is not None]

    def _delta(self, event: OutputEvent) -> MessageDelta | None:
        if len(event) == 2:
            kind, text = event
            return MessageDelta(content=text) if kind == "content" else MessageDelta(reasoning_content=text)
        part, index, value = event
        if isinstance(value, bool):  # the end of a call, which adds nothing
            return None
        if part == "tool_call_start":
            return MessageDelta(tool_call=ToolCallDelta(index, id=self._call_id(), name=value))
        return MessageDelta(tool_call=ToolCallDelta(index, arguments=value))

    def _call_id(self) -> str:
        return secrets.token_hex(5)[:9] if self._nine_letters else f"call_{secrets.token_hex(12)}"


def ends_inside_reasoning(message: Mapping[str, Any]) -> bool:
    """Whether the text of a message that is to be continued has opened its reasoning and not closed it."""
    content = message.get("content")
    if isinstance(content, list) and content and isinstance(content[-1], Mapping):
        content = content[-1].get("text")
    return isinstance(content, str) and content.rfind("<think>") > content.rfind("</think>")
