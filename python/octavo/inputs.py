"""The forms a prompt may take, and what each becomes before it reaches the engine."""

from __future__ import annotations

import json
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict

import numpy as np

from octavo._core import FieldError, all_ints, choose_tools
from octavo.errors import ParameterError, check_text
from octavo.message_format import AnswerFormat, Tools


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]


PromptType: TypeAlias = str | Sequence[int] | TextPrompt | TokensPrompt
Message = Mapping[str, Any]


@dataclass(slots=True, frozen=True)
class Prompt:
    """A prompt in one form: its text (if it came as text) or its ids (if it came as ids)."""

    text: str | None
    token_ids: list[int] | None
    answer: AnswerFormat | None = None
    """How the answer becomes a message, if this is a chat."""


def parse_prompts(prompts: PromptType | Sequence[PromptType]) -> list[Prompt]:
    """Turns what the user gave into a list of prompts.

    Raises:
        ParameterError: a prompt is empty, of no known form, or holds something that is no token id.
    """
    if isinstance(prompts, (str, Mapping)) or _is_token_list(prompts):
        return [parse_prompt(prompts)]
    if not _is_list(prompts) or not prompts:
        raise ParameterError("prompts", prompts, "a prompt or a non-empty list of prompts")
    return [parse_prompt(p) for p in prompts]


def parse_prompt(prompt: Any) -> Prompt:
    """Turns one prompt into its single form; see `parse_prompts`."""
    if isinstance(prompt, Mapping):
        token_ids = prompt.get("prompt_token_ids")
        if token_ids is not None:
            if isinstance(token_ids, (str, Mapping)):
                raise ParameterError("prompt_token_ids", token_ids, "a list of token ids")
            return parse_prompt(token_ids)
        if isinstance(prompt.get("prompt"), str):
            return parse_prompt(prompt["prompt"])
        raise ParameterError("prompts", dict(prompt), "a mapping with 'prompt' (text) or 'prompt_token_ids'")
    if isinstance(prompt, str):
        return Prompt(check_text("prompts", prompt), None)
    if isinstance(prompt, np.ndarray):
        prompt = prompt.tolist()
    if _is_list(prompt):
        if not prompt:
            raise ParameterError("prompts", prompt, "at least one token id")
        token_ids = list(prompt)
        if all_ints(token_ids):
            return Prompt(None, token_ids)
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, numbers.Integral):
                raise ParameterError("prompts", token, "integer token ids")
        return Prompt(None, [int(token) for token in prompt])
    raise ParameterError("prompts", prompt, "text, a list of token ids, or a mapping with one of them")


def _is_token_list(prompts: Any) -> bool:
    if isinstance(prompts, np.ndarray):
        return prompts.ndim == 1
    return _is_list(prompts) and bool(prompts) and isinstance(prompts[0], numbers.Integral)


def _is_list(value: Any) -> bool:
    """Bytes are no list of ids: whoever passes them means text."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview))


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Checks the outer form of a conversation; the template judges the rest.

    Raises:
        ParameterError: not a non-empty list of mappings with a `role`.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ParameterError("messages", messages, "a non-empty list of messages")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ParameterError(f"messages[{i}]", message, "a mapping with a 'role'")
    return [dict(m) for m in messages]


@dataclass(slots=True, frozen=True)
class ChatOptions:
    """What a conversation is rendered with besides its messages; names follow vLLM's.

    Raises:
        ParameterError: an option is of a wrong kind or holds a value that JSON cannot.
    """

    add_generation_prompt: bool = True
    """End the prompt with the beginning of an answer."""
    continue_final_message: bool = False
    """End the prompt inside the last message, for the model to go on with it."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """Functions that the model may call, in OpenAI's form."""
    tool_choice: str | Mapping[str, Any] | None = None
    """`auto`, `none` (the model is not told of the tools), `required`, a function that must be called, or `allowed_tools`."""
    chat_template: str | None = None
    """Another template than the model's."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    """Further variables of the template, such as `enable_thinking`."""
    parallel_tool_calls: bool = True
    """Whether a forced answer may have more than one call."""

    def __post_init__(self) -> None:
        for name in ("add_generation_prompt", "continue_final_message", "parallel_tool_calls"):
            if not isinstance(getattr(self, name), bool):
                raise ParameterError(name, getattr(self, name), "True or False")
        if self.tools is not None and not (_is_list(self.tools) and all(isinstance(t, Mapping) for t in self.tools)):
            raise ParameterError("tools", self.tools, "a list of mappings")
        if self.chat_template_kwargs is not None and not isinstance(self.chat_template_kwargs, Mapping):
            raise ParameterError("chat_template_kwargs", self.chat_template_kwargs, "a mapping")
        self.resolve_tools()

    def resolve_tools(self) -> Tools:
        """The tools that the model is told of, and whether it must call one."""
        choice = None if self.tool_choice is None else to_json("tool_choice", self.tool_choice)
        try:
            told, must_call, name = choose_tools(to_json("tools", [dict(tool) for tool in self.tools or ()]), choice)
        except FieldError as error:
            param, allowed = error.args
            raise ParameterError(param, self.tool_choice if param == "tool_choice" else self.tools, allowed) from error
        return Tools(None if told == "[]" else told, must_call, name, self.parallel_tool_calls)

    def kwargs_json(self) -> str:
        """The further variables."""
        return to_json("chat_template_kwargs", dict(self.chat_template_kwargs or {}))


def to_json(name: str, value: Any) -> str:
    """JSON text of an argument.

    Raises:
        ParameterError: it has a value that JSON cannot hold.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ParameterError(name, value, f"JSON values ({error})") from error
    return check_text(name, text)
