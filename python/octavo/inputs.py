"""The forms a prompt may take, and what each becomes before it reaches the engine."""

from __future__ import annotations

import json
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict

import numpy as np

from octavo.errors import ParameterError, check_text


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
class TemplateArguments:
    """What a chat template is rendered with, as JSON."""

    messages: str
    tools: str | None
    kwargs: str


def template_arguments(messages: Any, tools: Any, kwargs: Any) -> TemplateArguments:
    """Checks the outer form of what a template gets, and writes it as JSON.

    Raises:
        ParameterError: names the argument that is of a wrong kind or has a value that JSON cannot hold.
    """
    if tools is not None and not (_is_list(tools) and all(isinstance(tool, Mapping) for tool in tools)):
        raise ParameterError("tools", tools, "a list of mappings")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ParameterError("chat_template_kwargs", kwargs, "a mapping")
    return TemplateArguments(
        _json("messages", messages),
        _json("tools", [dict(tool) for tool in tools]) if tools else None,
        _json("chat_template_kwargs", dict(kwargs or {})),
    )


def _json(name: str, value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ParameterError(name, value, f"JSON values ({error})") from error
    return check_text(name, text)
