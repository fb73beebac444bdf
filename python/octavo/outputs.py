"""What a request gives back; names and shapes follow vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

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
class ToolCall:
    """A call of a function that the model asks for."""

    id: str
    """Names the call in the message that brings its result."""
    name: str
    arguments: str
    """JSON, as the model wrote it: not valid if the model broke off or was cut inside it."""


@dataclass(slots=True)
class ToolCallDelta:
    """What is added to one call; `id` and `name` come with its first delta."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class MessageDelta:
    """What is added to a message: text of one kind, or part of a call."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_call: ToolCallDelta | None = None


@dataclass(slots=True)
class ChatMessage:
    """An answer, split into the parts that its format tells apart."""

    content: str = ""
    reasoning_content: str | None = None
    """What the model wrote before its answer to think; None if nothing."""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def add(self, delta: MessageDelta) -> None:
        """Appends what a delta brings; all deltas in their order make the whole message."""
        if delta.content is not None:
            self.content += delta.content
        if delta.reasoning_content is not None:
            self.reasoning_content = (self.reasoning_content or "") + delta.reasoning_content
        call = delta.tool_call
        if call is not None:
            if call.index == len(self.tool_calls):
                self.tool_calls.append(ToolCall(call.id or "", call.name or "", ""))
            self.tool_calls[call.index].arguments += call.arguments

    def to_dict(self) -> dict[str, Any]:
        """The message in OpenAI's form, to go on with: `messages.append(message.to_dict())`."""
        found: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning_content is not None:
            found["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            found["content"] = self.content or None
            found["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return found


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
    message: ChatMessage | None = None
    """In a chat, `text` split into content, reasoning and tool calls; `text` has all of it, with the format's markers."""
    deltas: list[MessageDelta] = field(default_factory=list)
    """What `message` has more than in the output that was yielded before."""

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
class EmbeddingOutput:
    """A prompt as a vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Its length."""
        return len(self.embedding)


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """A prompt and its vector."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    num_cached_tokens: int = 0


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
