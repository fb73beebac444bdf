"""The forms a prompt may take, and what each becomes before it reaches the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict

import numpy as np

from octavo.errors import ParameterError


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
    if not isinstance(prompts, Sequence) or not prompts:
        raise ParameterError("prompts", prompts, "a prompt or a non-empty list of prompts")
    return [parse_prompt(p) for p in prompts]


def parse_prompt(prompt: Any) -> Prompt:
    """Turns one prompt into its single form; see `parse_prompts`."""
    if isinstance(prompt, Mapping):
        if prompt.get("prompt_token_ids") is not None:
            return parse_prompt(prompt["prompt_token_ids"])
        if isinstance(prompt.get("prompt"), str):
            return Prompt(prompt["prompt"], None)
        raise ParameterError("prompts", dict(prompt), "a mapping with 'prompt' (text) or 'prompt_token_ids'")
    if isinstance(prompt, str):
        return Prompt(prompt, None)
    if isinstance(prompt, np.ndarray):
        prompt = prompt.tolist()
    if isinstance(prompt, Sequence):
        if not prompt:
            raise ParameterError("prompts", prompt, "at least one token id")
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, int):
                raise ParameterError("prompts", token, "integer token ids")
        return Prompt(None, list(prompt))
    raise ParameterError("prompts", prompt, "text, a list of token ids, or a mapping with one of them")


def _is_token_list(prompts: Any) -> bool:
    if isinstance(prompts, np.ndarray):
        return prompts.ndim == 1
    return isinstance(prompts, Sequence) and bool(prompts) and isinstance(prompts[0], int)


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
