"""Finds a model's tokenizer and chat template on disk, and makes prompts of conversations."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo._core import ChatTemplate, Gguf, OutputParser, TemplateError, Tokenizer
from octavo.errors import ParameterError, check_text
from octavo.inputs import ChatOptions, Prompt, to_json
from octavo.message_format import ChatFormat, ends_inside_reasoning


def load_tokenizer(where: str | Path) -> Tokenizer:
    """The tokenizer of a folder, a `tokenizer.json` or a `.gguf` file.

    Raises:
        ParameterError: there is none, or it cannot be read; the message says what is wrong.
    """
    path = Path(where)
    try:
        if path.suffix == ".gguf":
            return Tokenizer.from_gguf(Gguf(path))
        return Tokenizer.from_dir(path) if path.is_dir() else Tokenizer.from_file(path)
    except ValueError as error:
        raise ParameterError("tokenizer", str(where), f"a folder, tokenizer.json or .gguf file ({error})") from error


def load_chat_template(given: str | None, tokenizer: Tokenizer | None) -> ChatTemplate | None:
    """The template given (its text or its path), else the one that came with the tokenizer, if any.

    Raises:
        ParameterError: the template has an error; the message gives the line.
    """
    if tokenizer is None:
        return None
    source = tokenizer.chat_template if given is None else _source(given)
    return None if source is None else compile_chat_template(source, tokenizer)


def compile_chat_template(source: str, tokenizer: Tokenizer) -> ChatTemplate:
    """A template of its text.

    Raises:
        ParameterError: it has an error; the message gives the line.
    """
    try:
        return ChatTemplate(check_text("chat_template", source), tokenizer)
    except TemplateError as error:
        raise ParameterError("chat_template", source, f"a template that compiles ({error})") from error


def _source(given: str) -> str:
    """A template's text; anything that looks like a path must be one."""
    if "{" in given or "\n" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError("chat_template", given, f"a template, or the path of a readable file ({error})") from error


class ChatRenderer:
    """Makes prompts of conversations that have the same template and options; may be used by many threads.

    Args:
        tokenizer: makes token ids.
        template: writes the text.
        chat_format: how the answer is read.
        options: what the template gets besides messages.

    Raises:
        ParameterError: the options ask for what the template cannot do.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, chat_format: ChatFormat, options: ChatOptions
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._format = chat_format
        self._options = options
        self._kwargs = options.kwargs_json()
        self._tools = options.resolve_tools()
        if self._tools.told is not None and not chat_format.writes_tools:
            raise ParameterError("tools", options.tools, "left out: the chat template has no place for tools")
        if self._tools.told is not None and not chat_format.reads_tools:
            allowed = "left out, or tool_call_parser given: the chat template does not tell how calls are written"
            raise ParameterError("tools", options.tools, allowed)

    def render(self, messages: list[dict[str, Any]]) -> Prompt:
        """The prompt of a conversation.

        Raises:
            ParameterError: the template refuses it, with the template's own message.
        """
        options = self._options
        try:
            text, token_ids = self._template.render(
                self._tokenizer,
                to_json("messages", messages),
                self._tools.told,
                options.add_generation_prompt,
                options.continue_final_message,
                self._kwargs,
            )
        except TemplateError as error:
            raise ParameterError("messages", messages, f"accepted by the chat template, which says: {error}") from error
        except ValueError as error:
            raise ParameterError("messages", messages, f"JSON values ({error})") from error
        last: Mapping[str, Any] = messages[-1]
        continued = options.continue_final_message
        is_open = ends_inside_reasoning(last) if continued else OutputParser.prompt_opens_reasoning(text)
        return Prompt(text, token_ids, self._format.answer(self._tokenizer, self._tools, is_open, continued))


@dataclass(frozen=True, slots=True)
class TextDescription:
    """What a model's files say about text."""

    tokenizer: str
    """The kind of tokenizer, or why there is none."""
    tokens: int
    """Entries of its vocabulary; 0: no tokenizer."""
    has_chat_template: bool
    """False of a base model."""


def describe_text(where: Path) -> TextDescription:
    """The kind of tokenizer and whether there is a chat template, of a folder or a `.gguf` file."""
    try:
        tokenizer = load_tokenizer(where)
    except ParameterError as error:
        return TextDescription(f"none that can be read ({error})", 0, False)
    return TextDescription(_kind(where), tokenizer.vocab_size, tokenizer.chat_template is not None)


def _kind(where: Path) -> str:
    if where.suffix == ".gguf":
        metadata = Gguf(where).metadata()
        name = str(metadata.get("tokenizer.ggml.model"))
        kinds = {"gpt2": "byte-level BPE", "llama": "SentencePiece"}
        return f"{kinds.get(name, name)} (GGUF, {metadata.get('tokenizer.ggml.pre', 'default')})"
    model = json.loads((where / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    return f"{model.get('type', 'BPE')} (tokenizer.json)"
