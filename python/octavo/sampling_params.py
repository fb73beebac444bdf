"""How the tokens of a request are drawn, with vLLM's names; every wrong value is refused here, by its name.

What needs no vocabulary is checked when an object is made, the rest by `validate_for`. `rust/core/src/params.rs` has
the same ranges and is what the engine trusts; `tests/vectors/sampling_params.json` holds the edge values on which both
must agree.
"""

from __future__ import annotations

import copy
import math
import numbers
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Self

from octavo.errors import ParameterError, check_text
from octavo.structured_outputs import StructuredOutputsParams

MAX_N: Final = 1024
"""Choices of one request at most."""
MAX_LIST_ENTRIES: Final = 1024
"""Entries of `logit_bias`, `stop`, `stop_token_ids` and `bad_words` at most."""
MAX_LIST_CHARS: Final = 1 << 16
"""Characters of all strings of `stop` or `bad_words` together at most."""
BAN_BIAS: Final = -100.0
"""A logit bias of this or less removes the token altogether."""

_INT32_MAX: Final = 2**31 - 1
_INTS: Final = {
    "n": (1, MAX_N),
    "top_k": (-1, _INT32_MAX),
    "seed": (-(2**63), 2**63 - 1),
    "max_tokens": (1, _INT32_MAX),
    "min_tokens": (0, _INT32_MAX),
    "logprobs": (0, _INT32_MAX),
    "prompt_logprobs": (0, _INT32_MAX),
    "truncate_prompt_tokens": (-1, _INT32_MAX),
}
_OPTIONAL: Final = frozenset({"seed", "max_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens"})
_FLOATS: Final = {
    "temperature": (0.0, 1e6),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1e-9, 1e9),
}
_BOOLS: Final = ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens")


def _integer(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ParameterError(name, value, "an integer")
    integer = int(value)
    if not low <= integer <= high:
        raise ParameterError(name, value, f"from {low} to {high}")
    return integer


def _number(name: str, value: object) -> float:
    """The value as the engine will see it, a float32; NaN is refused, infinities are left to the caller."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ParameterError(name, value, "a number")
    try:
        rounded: float = struct.unpack("f", struct.pack("f", float(value)))[0]
    except OverflowError:
        raise ParameterError(name, value, "a number that float32 can hold") from None
    if math.isnan(rounded):
        raise ParameterError(name, value, "a number, not NaN")
    return rounded


def _in_range(name: str, value: object, low: float, high: float, *, open_below: bool = False) -> float:
    number = _number(name, value)
    if not _number(name, low) <= number <= _number(name, high) or (open_below and number == low):
        border = f"above {low:g} and at most {high:g}" if open_below else f"from {low:g} to {high:g}"
        raise ParameterError(name, value, border)
    return float(value)  # type: ignore[arg-type]


def _bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ParameterError(name, value, "True or False")


def _list(name: str, value: object) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise ParameterError(name, value, "a list")
    return list(value)


def _strings(name: str, value: object) -> list[str]:
    strings = _list(name, value)
    _limit_entries(name, strings)
    for one in strings:
        if not isinstance(one, str) or not one:
            raise ParameterError(name, one, "non-empty strings")
        check_text(name, one)
    if sum(map(len, strings)) > MAX_LIST_CHARS:
        raise ParameterError(
            name, f"{sum(map(len, strings))} characters", f"at most {MAX_LIST_CHARS} characters in all"
        )
    return strings


def _token_ids(name: str, value: object, limit: int | None = MAX_LIST_ENTRIES) -> list[int]:
    ids = _list(name, value)
    if limit is not None:
        _limit_entries(name, ids, limit)
    return [_integer(name, one, 0, _INT32_MAX) for one in ids]


def _limit_entries(name: str, entries: list[Any] | dict[int, float], limit: int = MAX_LIST_ENTRIES) -> None:
    if len(entries) > limit:
        raise ParameterError(name, f"{len(entries)} entries", f"at most {limit} entries")


@dataclass(kw_only=True)
class SamplingParams:
    """Parameters of one generation request.

    All numbers are checked at construction: a wrong type or range raises `ParameterError`, a `ValueError` with the name
    in `.param`. The order of processing is logit bias, penalties, `min_tokens` and bans, temperature, top-k, top-p,
    min-p.
    """

    n: int = 1
    """Choices to generate for the prompt. With a seed they are reproducible, and differ from each other."""
    presence_penalty: float = 0.0
    """From -2 to 2; subtracted once from the logit of every token that occurs among the outputs (never the prompt)."""
    frequency_penalty: float = 0.0
    """From -2 to 2; subtracted as often as the token occurs among the outputs."""
    repetition_penalty: float = 1.0
    """Above 0 (1e-9 to 1e9); divides positive and multiplies negative logits of tokens in prompt or outputs."""
    temperature: float = 1.0
    """From 0 to 1e6; below 1e-5 is greedy: the likeliest token, the lower id if two are equal."""
    top_p: float = 1.0
    """Above 0, at most 1; a token is kept if those likelier than it add up to less than this. 1 keeps all."""
    top_k: int = -1
    """Likeliest tokens kept (and those that equal the last of them); -1, 0 or more than the vocabulary keep all."""
    min_p: float = 0.0
    """From 0 to 1; tokens less likely than this times the likeliest are dropped."""
    seed: int | None = None
    """Any signed 64-bit integer. The same seed gives the same draws, whatever else runs. `None`: ever another one."""
    stop: str | list[str] | None = None
    """Texts that end the request; none is empty. Kept as a list."""
    stop_token_ids: list[int] | None = None
    """Ids that end the request, also under `ignore_eos`. Kept as a list."""
    bad_words: list[str] | None = None
    """Words whose last token is not drawn while the outputs end with the tokens before it. Kept as a list."""
    include_stop_str_in_output: bool = False
    """Whether the text ends with the stop string that was met."""
    ignore_eos: bool = False
    """Whether to go on after the model's end-of-sequence tokens."""
    max_tokens: int | None = 16
    """Output tokens at most; `None`: what is left of the context. More is clamped to that, and reported as `length`."""
    min_tokens: int = 0
    """Output tokens before which neither an end-of-sequence nor a stop token is drawn, and no stop string is tested."""
    logprobs: int | None = None
    """Likeliest tokens reported for each output token, beside the drawn one; 0: only that. Of the raw distribution."""
    prompt_logprobs: int | None = None
    """The same for each prompt token but the first."""
    detokenize: bool = True
    """Whether text is made of the tokens."""
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the text."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits, by token id, from -100 to 100. -100 (or -inf) bans the token altogether."""
    allowed_token_ids: list[int] | None = None
    """If given, no other token is drawn. Must not be empty."""
    truncate_prompt_tokens: int | None = None
    """Keeps the last so many tokens of the prompt; -1: what the context allows."""
    structured_outputs: StructuredOutputsParams | None = None
    """What the output must be. It ends where its grammar does: `ignore_eos` and `min_tokens` cannot be given beside it."""

    def __post_init__(self) -> None:
        """Checks types and ranges, and makes lists of what may be given otherwise.

        Raises:
            ParameterError: names the first parameter that is wrong.
        """
        for name, (low, high) in _INTS.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                setattr(self, name, _integer(name, value, low, high))
        for name, (low_float, high_float) in _FLOATS.items():
            value = _in_range(name, getattr(self, name), low_float, high_float, open_below=name == "top_p")
            setattr(self, name, value)
        for name in _BOOLS:
            _bool(name, getattr(self, name))
        self.stop = _strings("stop", [self.stop] if isinstance(self.stop, str) else self.stop)
        self.bad_words = _strings("bad_words", self.bad_words)
        self.stop_token_ids = _token_ids("stop_token_ids", self.stop_token_ids)
        self._check_lists()
        if self.truncate_prompt_tokens == 0:
            raise ParameterError("truncate_prompt_tokens", 0, "-1 or above 0")
        if self.structured_outputs is not None:
            self.structured_outputs = StructuredOutputsParams.parse(self.structured_outputs)
            self.check_ends_with_grammar()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")

    def check_ends_with_grammar(self) -> None:
        """Checks what a grammar leaves no sense to: behind its end only an end of sequence may come."""
        for name in ("ignore_eos", "min_tokens"):
            if getattr(self, name):
                allowed = "left out with structured output or forced calls, which end where their grammar does"
                raise ParameterError(name, getattr(self, name), allowed)

    def _check_lists(self) -> None:
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _token_ids("allowed_token_ids", self.allowed_token_ids, limit=None)
            if not self.allowed_token_ids:
                raise ParameterError("allowed_token_ids", [], "None or not empty")
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise ParameterError("logit_bias", self.logit_bias, "a mapping from token ids to numbers")
            _limit_entries("logit_bias", dict(self.logit_bias))
            self.logit_bias = {
                _integer("logit_bias", token, 0, _INT32_MAX): _bias(value) for token, value in self.logit_bias.items()
            }

    @classmethod
    def from_optional(cls, **given: Any) -> Self:
        """Makes parameters of values of which any may be `None` for "not given", as requests have them.

        Raises:
            ParameterError: a value is wrong, or a name unknown.
        """
        known = {one.name for one in fields(cls)}
        for name, value in given.items():
            if name not in known:
                raise ParameterError(name, value, "left out: there is no such sampling parameter")
        return cls(**{name: value for name, value in given.items() if value is not None or name in _OPTIONAL})

    def clone(self) -> Self:
        """A copy that shares nothing with this one."""
        return copy.deepcopy(self)

    def validate_for(self, vocab_size: int, max_logprobs: int = 20) -> None:
        """Checks what depends on the model, and once more what may have been assigned since the construction.

        Args:
            vocab_size: ids are below it.
            max_logprobs: the engine's limit of `logprobs` and `prompt_logprobs`; -1: the vocabulary.

        Raises:
            ParameterError: names the parameter that is wrong for this model.
        """
        self.__post_init__()
        limit = vocab_size if max_logprobs < 0 else min(max_logprobs, vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and value > limit:
                raise ParameterError(name, value, f"from 0 to {limit}")
        bias = self.logit_bias or {}
        allowed = self.allowed_token_ids
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids or []),
            ("logit_bias", bias),
            ("allowed_token_ids", allowed or []),
        ):
            for token in ids:
                if token >= vocab_size:
                    raise ParameterError(name, token, f"a token id below {vocab_size}, the size of the vocabulary")
        if allowed is not None and len(allowed) > vocab_size:
            raise ParameterError("allowed_token_ids", f"{len(allowed)} entries", f"at most {vocab_size} entries")
        self._check_something_left(vocab_size)

    def _check_something_left(self, vocab_size: int) -> None:
        """The first output has a token to choose; the engine looks again, with bad words and the model's stop ids."""
        banned = {token for token, value in (self.logit_bias or {}).items() if value <= BAN_BIAS}
        if self.min_tokens > 0:
            banned.update(self.stop_token_ids or [])
        if self.allowed_token_ids is not None:
            if banned.issuperset(self.allowed_token_ids):
                raise ParameterError("allowed_token_ids", self.allowed_token_ids, "such that a token is left")
        elif len(banned) >= vocab_size:
            name = "logit_bias" if self.logit_bias else "min_tokens"
            raise ParameterError(name, getattr(self, name), "such that a token is left")


def _bias(value: object) -> float:
    number = _number("logit_bias", value)
    if number == float("-inf"):
        return number
    return _in_range("logit_bias", number, BAN_BIAS, -BAN_BIAS)


@dataclass(kw_only=True)
class BeamSearchParams:
    """Parameters of a beam search; a score is the sum of log-probabilities over a power of the length."""

    beam_width: int
    """Sequences kept, from 1 to 1024."""
    max_tokens: int
    """Output tokens at most."""
    ignore_eos: bool = False
    """Whether to go on after the model's end-of-sequence tokens."""
    temperature: float = 0.0
    """Of the log-probabilities that are added up; below 1e-5 they are the model's own."""
    length_penalty: float = 1.0
    """Scores are divided by the number of generated tokens to this power; from -100 to 100."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Ids that end a sequence."""
    include_stop_str_in_output: bool = False
    """Whether texts keep the token that ended them."""

    def __post_init__(self) -> None:
        """Checks types and ranges.

        Raises:
            ParameterError: names the first parameter that is wrong.
        """
        self.beam_width = _integer("beam_width", self.beam_width, 1, MAX_N)
        self.max_tokens = _integer("max_tokens", self.max_tokens, 1, _INT32_MAX)
        self.temperature = _in_range("temperature", self.temperature, *_FLOATS["temperature"])
        self.length_penalty = _in_range("length_penalty", self.length_penalty, -100.0, 100.0)
        self.stop_token_ids = _token_ids("stop_token_ids", self.stop_token_ids)
        _bool("ignore_eos", self.ignore_eos)
        _bool("include_stop_str_in_output", self.include_stop_str_in_output)
