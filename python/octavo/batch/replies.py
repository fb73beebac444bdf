"""What OpenAI's protocol says in return: bodies of answers and of errors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.errors import ContextLengthError, InvalidRequestError, ParameterError
from octavo.outputs import ChatMessage, CompletionOutput, Logprob, PositionLogprobs, RequestOutput


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is repeated before its completions."""

    text: str
    pieces: list[bytes]
    """The bytes of each of its tokens."""

    def offsets(self) -> list[int]:
        """The character of `text` at which each token begins; a token that is not in the text has no width."""
        whole, position, characters, found = self.text.encode(), 0, 0, []
        for piece in self.pieces:
            found.append(characters)
            # SentencePiece writes a space before the first word.
            for form in (piece, piece.removeprefix(b" ")):
                if whole.startswith(form, position):
                    position += len(form)
                    characters += sum(byte & 0xC0 != 0x80 for byte in form)
                    break
        return found


def chat_reply(
    reply_id: str,
    model: str,
    output: RequestOutput,
    top_logprobs: int = 0,
    *,
    parallel_tool_calls: bool = True,
    names_function: bool = False,
) -> dict[str, Any]:
    """The body of an answered `/v1/chat/completions`.

    Args:
        reply_id: unique part of the reply's id.
        model: the model that answered.
        output: the answer to a chat.
        top_logprobs: how many likeliest tokens were asked for.
        parallel_tool_calls: if not, the first call of each message alone is told.
        names_function: whether the request names the function that must be called; then a call is no decision of the model's,
            and finishes with `stop`.
    """
    choices = []
    for choice in output.outputs:
        message = _message(choice, parallel_tool_calls)
        # A message that was cut may end inside a call; then the cut is what must be told.
        called = choice.finish_reason == "stop" and "tool_calls" in message and not names_function
        choices.append(
            {
                "index": choice.index,
                "message": message,
                "logprobs": None if choice.logprobs is None else _chat_logprobs(choice, top_logprobs),
                "finish_reason": "tool_calls" if called else choice.finish_reason,
            }
        )
    return _reply(f"chatcmpl-{reply_id}", "chat.completion", model, choices, [output])


def completion_reply(
    reply_id: str, model: str, outputs: Sequence[RequestOutput], echoes: Sequence[Echo] | None = None
) -> dict[str, Any]:
    """The body of an answered `/v1/completions`.

    Args:
        reply_id: unique part of the reply's id.
        model: the model that answered.
        outputs: one for each prompt, all with the same number of choices.
        echoes: the prompts, if they are to be repeated.
    """
    choices: list[dict[str, Any]] = []
    for i, output in enumerate(outputs):
        echo = None if echoes is None else echoes[i]
        for choice in output.outputs:
            choices.append(
                {
                    "index": len(choices),
                    "text": (echo.text if echo else "") + choice.text,
                    "logprobs": None if choice.logprobs is None else _completion_logprobs(output, choice, echo),
                    "finish_reason": choice.finish_reason,
                }
            )
    return _reply(f"cmpl-{reply_id}", "text_completion", model, choices, outputs)


def error_reply(error: Exception) -> tuple[int, dict[str, Any]]:
    """The status and the body for a request that failed: 400 if the client can mend it, else 500."""
    if isinstance(error, ParameterError):
        code = error.code if isinstance(error, ContextLengthError) else None
        return 400, error_body(str(error), error.param, code)
    if isinstance(error, InvalidRequestError):
        return 400, error_body(str(error))
    return 500, error_body(str(error), kind="server_error")


def error_body(
    message: str, param: str | None = None, code: str | None = None, kind: str = "invalid_request_error"
) -> dict[str, Any]:
    """An error of the protocol."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Tokens of all prompts and choices of one body."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }


def _reply(
    reply_id: str, kind: str, model: str, choices: list[dict[str, Any]], outputs: Sequence[RequestOutput]
) -> dict[str, Any]:
    return {
        "id": reply_id,
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": usage(outputs),
    }


def _message(choice: CompletionOutput, parallel_tool_calls: bool) -> dict[str, Any]:
    message = ChatMessage(choice.text) if choice.message is None else choice.message
    told = {**message.to_dict(), "refusal": None}
    if not parallel_tool_calls and "tool_calls" in told:
        told["tool_calls"] = told["tool_calls"][:1]
    return told


def _chat_logprobs(choice: CompletionOutput, top_logprobs: int) -> dict[str, Any]:
    content = []
    for position in choice.logprobs or []:
        # The drawn token comes first, whatever its rank.
        drawn, *others = position.values()
        if drawn.rank is not None and drawn.rank <= top_logprobs:
            others.insert(drawn.rank - 1, drawn)
        content.append({**_token(drawn), "top_logprobs": [_token(entry) for entry in others]})
    return {"content": content, "refusal": None}


def _token(entry: Logprob) -> dict[str, Any]:
    return {
        "token": entry.decoded_token,
        "logprob": entry.logprob,
        "bytes": None if entry.bytes is None else list(entry.bytes),
    }


def _completion_logprobs(output: RequestOutput, choice: CompletionOutput, echo: Echo | None) -> dict[str, Any]:
    positions: list[PositionLogprobs | None] = list(choice.logprobs or [])
    tokens, offsets, first = list(choice.token_ids), list(choice.text_offsets or []), ""
    if echo is not None:
        # Nothing is known of the first token of a prompt but itself.
        first = echo.pieces[0].decode("utf-8", "replace")
        positions = [*(output.prompt_logprobs or []), *positions]
        tokens = [*output.prompt_token_ids, *tokens]
        offsets = [*echo.offsets(), *(len(echo.text) + offset for offset in offsets)]
    chosen = [None if p is None else p[token] for token, p in zip(tokens, positions, strict=True)]
    return {
        "tokens": [first if entry is None else entry.decoded_token for entry in chosen],
        "token_logprobs": [None if entry is None else entry.logprob for entry in chosen],
        "top_logprobs": [
            None if p is None else {str(entry.decoded_token): entry.logprob for entry in p.values()} for p in positions
        ],
        "text_offset": offsets,
    }
