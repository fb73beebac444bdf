"""From updates of the core to the outputs a user sees: one assembler a request, one batch a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from octavo._core import ChoiceUpdate, EngineCore, GrammarSource, Mailbox, Tokenizer, Update
from octavo.errors import EngineError
from octavo.message_format import AnswerFormat
from octavo.outputs import ChatMessage, CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from octavo.pooling import Pooling
from octavo.sampling_params import SamplingParams

# How long a blocked caller may go without noticing Ctrl-C, in seconds.
_SIGNAL_LATENCY = 0.2


@dataclass(slots=True)
class Submission:
    """A request whose every part has been checked."""

    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    """Resolved: seed, stop ids and `max_tokens` are set."""
    priority: int = 0
    cache_salt: str | None = None
    tenant: str | None = None
    stream: bool = False
    answer: AnswerFormat | None = None
    """How the text of each choice becomes a message, if this is a chat."""
    grammar: GrammarSource | None = None
    """What the outputs must be; it compiles."""
    pooling: Pooling | None = None
    """How the prompt becomes a vector, if that is wanted; then the one output token means nothing."""

    @property
    def shown_special_ids(self) -> tuple[int, ...]:
        """Special tokens that stay in the text under `skip_special_tokens`: the markers that an output parser reads."""
        return () if self.answer is None else self.answer.shown_special_ids


class RequestAssembler:
    """Merges the updates of one request into its growing `RequestOutput`."""

    def __init__(self, request_id: int, submission: Submission, tokenizer: Tokenizer | None) -> None:
        wants_logprobs = submission.params.logprobs is not None
        self._tokenizer = tokenizer
        self.vector: list[float] | None = None
        """What the prompt became, if that was wanted."""
        answer = submission.answer if submission.params.detokenize else None
        self._readers = [] if answer is None else [answer.reader() for _ in range(submission.params.n)]
        self.output = RequestOutput(
            request_id=str(request_id),
            prompt=submission.prompt,
            prompt_token_ids=submission.prompt_token_ids,
            outputs=[
                CompletionOutput(
                    index=i,
                    text="",
                    token_ids=[],
                    cumulative_logprob=0.0 if wants_logprobs else None,
                    logprobs=[] if wants_logprobs else None,
                    text_offsets=[] if wants_logprobs else None,
                    message=None if answer is None else ChatMessage(),
                )
                for i in range(submission.params.n)
            ],
        )

    def merge(self, *updates: Update) -> RequestOutput:
        """Applies updates and returns the whole request so far; its `deltas` are what these updates brought."""
        for choice in self.output.outputs:
            choice.deltas = []
        for update in updates:
            self._merge(update)
        return self.output

    def _merge(self, update: Update) -> None:
        output = self.output
        output.num_cached_tokens = update.num_cached_tokens
        if update.error is not None:
            output.error = update.error
        if update.pooled is not None:
            self.vector = update.pooled
        if update.prompt_logprobs is not None:
            output.prompt_logprobs = [None if p is None else self._position(*p) for p in update.prompt_logprobs]
        for change in update.choices:
            self._merge_choice(output.outputs[change.index], change)

    def _merge_choice(self, choice: CompletionOutput, change: ChoiceUpdate) -> None:
        choice.text += change.text
        choice.token_ids.extend(change.token_ids)
        if choice.logprobs is not None and choice.text_offsets is not None:
            positions = [self._position(*p) for p in change.logprobs]
            choice.logprobs.extend(positions)
            sampled = (p[t].logprob for p, t in zip(positions, change.token_ids, strict=True))
            choice.cumulative_logprob = (choice.cumulative_logprob or 0.0) + sum(sampled)
            choice.text_offsets.extend(change.text_offsets)
        if change.finish_reason is not None:
            choice.finish_reason = change.finish_reason
            choice.stop_reason = change.stop_reason
        if choice.message is not None:
            self._extend_message(choice, choice.message, change.text)

    def _extend_message(self, choice: CompletionOutput, message: ChatMessage, text: str) -> None:
        reader = self._readers[choice.index]
        deltas = reader.push(text)
        if choice.finished:
            deltas += reader.finish()
        for delta in deltas:
            message.add(delta)
        choice.deltas += deltas

    def _position(self, ids: Sequence[int], logprobs: Sequence[float], rank: int) -> PositionLogprobs:
        """The chosen token first, then the likeliest in order; ranks of the latter are their places."""
        found: PositionLogprobs = {ids[0]: self._logprob(ids[0], logprobs[0], rank)}
        for place, (token, logprob) in enumerate(zip(ids[1:], logprobs[1:], strict=True), start=1):
            found.setdefault(token, self._logprob(token, logprob, place))
        return found

    def _logprob(self, token: int, logprob: float, rank: int) -> Logprob:
        if self._tokenizer is None:
            return Logprob(logprob, rank)
        raw = self._tokenizer.token_bytes(token)
        return Logprob(logprob, rank, raw.decode("utf-8", "replace"), raw)


@dataclass(slots=True)
class Batch:
    """Requests submitted together; leaving the context aborts whatever has not finished."""

    core: EngineCore
    mailbox: Mailbox
    assemblers: dict[int, RequestAssembler] = field(default_factory=dict)
    unfinished: set[int] = field(default_factory=set)

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for request_id in self.unfinished:
            self.core.abort(request_id)
        # The core keeps a request until its end is fetched.
        self.mailbox.receive(0.0)

    def updates(self) -> Iterator[RequestOutput]:
        """Yields a request's output each time it has grown, until all have finished.

        A request that failed alone is finished, with `error` and `finish_reason="error"`; the others go on.

        Raises:
            EngineError: the engine has failed.
        """
        while self.unfinished:
            for update in self.mailbox.receive(_SIGNAL_LATENCY):
                output = self.assemblers[update.request_id].merge(update)
                if output.finished:
                    self.unfinished.discard(update.request_id)
                if output.error is not None and self.core.is_shut_down():
                    raise EngineError(f"request {output.request_id}: {output.error}")
                yield output

    def collect(self, advance: Callable[[RequestOutput], None]) -> list[RequestOutput]:
        """Waits for all requests, calling `advance` with each that finishes; outputs are in order of submission."""
        for output in self.updates():
            if output.finished:
                advance(output)
        return [assembler.output for assembler in self.assemblers.values()]
