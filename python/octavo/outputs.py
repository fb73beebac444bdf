"""What a request gives back; names and shapes follow vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token at one position.

    `rank` counts from 1 (the likeliest token). `decoded_token` is the token alone, as text; `bytes` are its true bytes, which
    a token that is part of a character needs.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None
    bytes: bytes | None = None


PositionLogprobs = dict[int, Logprob]


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a request."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended the choice; None for the model's own end-of-sequence token."""
    text_offsets: list[int] | None = None
    """Character offset in `text` at which each token begins; given with logprobs."""

    @property
    def finished(self) -> bool:
        """Whether the choice has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request and its choices."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0
    error: str | None = None

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return bool(self.outputs) and all(o.finished for o in self.outputs)


@dataclass(slots=True)
class BeamSearchSequence:
    """One hypothesis of a beam search: prompt and outputs together."""

    tokens: list[int]
    text: str
    cum_logprob: float
    score: float
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The best hypotheses, best first."""

    sequences: list[BeamSearchSequence]
