"""What an OpenAI request body means: from its JSON to messages or prompts and `SamplingParams`.

Every field is known and checked, or refused by its name; nothing is ignored silently but what has no meaning for an engine
of one's own (`user`, `metadata`, …). Knows no engine: what depends on the model is checked by `LLMEngine.submission`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from octavo._core import FIELDS_WITHOUT_MEANING
from octavo.errors import ParameterError
from octavo.inputs import ChatOptions, Prompt, check_messages, parse_prompt, parse_prompts
from octavo.sampling_params import SamplingParams
from octavo.structured_outputs import BODY_FIELDS, StructuredOutputsParams

MAX_PROMPTS: Final = 2048
"""Prompts of one completion body at most."""

# Fields that mean for `SamplingParams` what they mean in a body; those after `stop` are extensions, in vLLM's names.
_SAMPLING: Final = (
    "n",
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "bad_words",
    "allowed_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "truncate_prompt_tokens",
)
_SHARED: Final = frozenset(
    {
        *_SAMPLING,
        *BODY_FIELDS,
        "model",
        "logit_bias",
        "max_tokens",
        "stream",
        "stream_options",
        "priority",
        "cache_salt",
    }
)
_CHAT: Final = frozenset(
    {
        "messages",
        "max_completion_tokens",
        "logprobs",
        "top_logprobs",
        "reasoning_effort",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "chat_template_kwargs",
        "add_generation_prompt",
        "continue_final_message",
    }
)
_COMPLETION: Final = frozenset({"prompt", "logprobs", "echo", "best_of"})
# Known fields with the one kind of value that asks for nothing we lack, and what is lacking.
_TEXT_ONLY: Final = "text output is all there is"
_OLD_TOOLS: Final = "'tools' is the newer form"
_UNSUPPORTED: Final[dict[str, tuple[tuple[Any, ...], str]]] = {
    "functions": (([],), f"left out: {_OLD_TOOLS}"),
    "function_call": (("none", "auto"), f"left out: {_OLD_TOOLS}"),
    "modalities": ((["text"],), f"['text']: {_TEXT_ONLY}"),
    "audio": ((), f"left out: {_TEXT_ONLY}"),
    "web_search_options": ((), "left out: there is no web search"),
    # A template is a program that can take any amount of memory (docs/text.md).
    "chat_template": ((), "left out: a template comes from the model's files or --chat-template"),
    "suffix": (("",), "left out: insertion is not supported"),
}


@dataclass(frozen=True, slots=True)
class _Body:
    params: SamplingParams
    model: str | None
    """The model that the body asks for; the caller decides whether it is the one that runs."""
    stream: bool
    include_usage: bool
    """Whether a stream ends with the usage."""
    priority: int
    cache_salt: str | None


@dataclass(frozen=True, slots=True)
class ChatBody(_Body):
    """A body of `/v1/chat/completions`."""

    messages: list[dict[str, Any]]
    template: dict[str, Any] = field(default_factory=dict)
    """Fields of `ChatOptions`."""
    parallel_tool_calls: bool = True
    """Whether an answer may have more than one call."""

    @property
    def names_function(self) -> bool:
        """Whether the function that must be called is named."""
        choice = self.template.get("tool_choice")
        return isinstance(choice, Mapping) and choice.get("type") == "function"


@dataclass(frozen=True, slots=True)
class CompletionBody(_Body):
    """A body of `/v1/completions`; choice `j` of prompt `i` has the index `i * n + j`."""

    prompts: list[Prompt]
    echo: bool = False
    """Whether texts and log-probabilities begin with the prompt's."""


def parse_chat_body(body: Mapping[str, Any], defaults: SamplingParams) -> ChatBody:
    """Checks a body of `/v1/chat/completions`.

    Args:
        body: the JSON object; `null` means "not given" everywhere.
        defaults: what a request gets that says nothing.

    Raises:
        ParameterError: names the first field that is unknown, wrong or not supported.
    """
    given = _given(body, _CHAT)
    sampling = _sampling(given)
    if "max_completion_tokens" in given:  # the newer name of `max_tokens`
        sampling["max_tokens"] = given["max_completion_tokens"]
    wanted = _flag(given, "logprobs")
    top = given.get("top_logprobs")
    if top is not None and (isinstance(top, bool) or not isinstance(top, int) or top < 0):
        raise ParameterError("top_logprobs", top, "an integer, 0 or more")
    if top is not None and not wanted:
        raise ParameterError("top_logprobs", top, "left out unless 'logprobs' is true")
    if wanted:
        sampling["logprobs"] = top or 0
    template: dict[str, Any] = {
        name: given[name]
        for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")
        if name in given
    }
    template |= _tools(given)
    if "reasoning_effort" in given:
        kwargs = template.get("chat_template_kwargs", {})
        if isinstance(kwargs, Mapping):
            template["chat_template_kwargs"] = {"reasoning_effort": given["reasoning_effort"], **kwargs}
    return ChatBody(
        **_common(given),
        params=_params(sampling, defaults),
        messages=_messages(given.get("messages")),
        template=template,
        parallel_tool_calls=_flag(given, "parallel_tool_calls", default=True),
    )


def parse_completion_body(body: Mapping[str, Any], defaults: SamplingParams) -> CompletionBody:
    """Checks a body of `/v1/completions`; see `parse_chat_body`."""
    given = _given(body, _COMPLETION)
    sampling = _sampling(given)
    logprobs = given.get("logprobs")
    if logprobs is not None:
        if isinstance(logprobs, bool) or not isinstance(logprobs, int):
            raise ParameterError("logprobs", logprobs, "an integer")
        sampling["logprobs"] = logprobs
    echo = _flag(given, "echo")
    if echo and logprobs is not None:
        sampling["prompt_logprobs"] = logprobs
    params = _params(sampling, defaults)
    best_of = given.get("best_of", params.n)
    if best_of != params.n:
        raise ParameterError("best_of", best_of, f"equal to n ({params.n}): choices are not ranked")
    return CompletionBody(**_common(given), params=params, prompts=_prompts(given.get("prompt")), echo=echo)


def _given(body: Any, own: frozenset[str]) -> dict[str, Any]:
    if not isinstance(body, Mapping):
        raise ParameterError("body", body, "a JSON object")
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in body.items():
        if name in _UNSUPPORTED:
            harmless, allowed = _UNSUPPORTED[name]
            if value is not None and value not in harmless:
                raise ParameterError(name, value, allowed)
        elif name not in own and name not in _SHARED and name not in FIELDS_WITHOUT_MEANING:
            raise ParameterError(name, value, "left out: there is no such field")
    return given


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    sampling = {name: given[name] for name in (*_SAMPLING, "max_tokens") if name in given}
    constraint = StructuredOutputsParams.of_body(given)
    if constraint is not None:
        sampling["structured_outputs"] = constraint
    if "logit_bias" in given:
        sampling["logit_bias"] = _logit_bias(given["logit_bias"])
    return sampling


def _params(sampling: dict[str, Any], defaults: SamplingParams) -> SamplingParams:
    return replace(defaults.clone(), **sampling)


def _logit_bias(value: Any) -> dict[int, Any]:
    """Keys of a JSON object are strings; those of a bias are token ids."""
    if not isinstance(value, Mapping):
        raise ParameterError("logit_bias", value, "an object of token ids and numbers")
    bias: dict[int, Any] = {}
    for token, amount in value.items():
        if not (isinstance(token, str) and token.isascii() and token.isdecimal() and len(token) <= 10):
            raise ParameterError("logit_bias", token, "an object whose keys are token ids")
        bias[int(token)] = amount
    return bias


def _common(given: Mapping[str, Any]) -> dict[str, Any]:
    model = given.get("model")
    if model is not None and not isinstance(model, str):
        raise ParameterError("model", model, "a string")
    stream = _flag(given, "stream")
    options = given.get("stream_options", {})
    if not isinstance(options, Mapping) or not set(options) <= {"include_usage", "include_obfuscation"}:
        raise ParameterError("stream_options", options, "an object with 'include_usage'")
    if options and not stream:
        raise ParameterError("stream_options", options, "left out unless 'stream' is true")
    return {
        "model": model,
        "stream": stream,
        "include_usage": _flag(options, "include_usage", "stream_options.include_usage"),
        "priority": given.get("priority", 0),
        "cache_salt": given.get("cache_salt"),
    }


def _tools(given: Mapping[str, Any]) -> dict[str, Any]:
    """The tools of a chat, and whether they may or must be used."""
    tools = given.get("tools", [])
    if not isinstance(tools, list):
        raise ParameterError("tools", tools, "a list of tools")
    fields: dict[str, Any] = {"tools": tools, "parallel_tool_calls": _flag(given, "parallel_tool_calls", default=True)}
    if "tool_choice" in given:
        fields["tool_choice"] = given["tool_choice"]
    ChatOptions(**fields)
    return fields if tools else {}


def _flag(given: Mapping[str, Any], name: str, shown: str | None = None, *, default: bool = False) -> bool:
    value = given.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ParameterError(shown or name, value, "true or false")
    return value


def _messages(value: Any) -> list[dict[str, Any]]:
    messages = check_messages(value)
    for i, message in enumerate(messages):
        content = message.get("content")
        if content is not None and not isinstance(content, str | list):
            raise ParameterError(f"messages[{i}].content", content, "text, a list of text parts, or null")
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ParameterError(f"messages[{i}].content", part, "made of text parts: this engine reads text only")
    return messages


def _prompts(value: Any) -> list[Prompt]:
    if isinstance(value, Mapping):  # a form of `LLM.generate`, not of the protocol
        raise ParameterError("prompt", value, "text, token ids, or a list of them")
    try:
        # A single list of ids is one prompt, and may be of any length.
        whole = isinstance(value, list) and bool(value) and not isinstance(value[0], str | list)
        prompts = [parse_prompt(value)] if whole else parse_prompts(value)
    except ParameterError as error:
        raise ParameterError("prompt", error.value, error.allowed) from error
    if len(prompts) > MAX_PROMPTS:
        raise ParameterError("prompt", f"{len(prompts)} prompts", f"at most {MAX_PROMPTS} prompts")
    return prompts
