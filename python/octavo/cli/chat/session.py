"""A conversation: its messages, its settings, and answers from the engine. Knows nothing of the terminal."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from octavo.errors import ContextLengthError, OctavoError, ParameterError, RequestError, check_text
from octavo.inputs import check_messages
from octavo.llm_engine import LLMEngine
from octavo.outputs import ChatMessage, MessageDelta
from octavo.requests import Batch, Submission
from octavo.sampling_params import SamplingParams

# What has no meaning for one answer that is shown as text.
_FIXED: Final = frozenset({"n", "logprobs", "prompt_logprobs", "detokenize", "truncate_prompt_tokens"})
SETTABLE: Final = tuple(f.name for f in fields(SamplingParams) if f.name not in _FIXED)
"""Sampling parameters that a conversation may set."""

_ROOM_SHARE: Final = 4
"""With `context_shift`, an answer without `max_tokens` gets at least the context over this."""


# What a message of a role may follow.
_BEFORE: Final = {
    "user": ("start", "assistant", "tool"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
    "end": ("start", "assistant", "tool"),
}

Show = Callable[[MessageDelta], None]
"""Gets what is added to an answer, in order."""


class ChatError(OctavoError):
    """The user asked for what cannot be done; the message says what to do instead."""


@dataclass(frozen=True, slots=True)
class AnswerStats:
    """What one answer took; times in seconds."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft: float
    decode_seconds: float
    """From the first token to the last."""
    finish_reason: str
    context_used: int
    context_size: int
    dropped_messages: int
    """Messages that made room for this answer."""

    @property
    def tokens_per_second(self) -> float | None:
        """Speed after the first token, if there was a second."""
        return (
            (self.output_tokens - 1) / self.decode_seconds if self.output_tokens > 1 and self.decode_seconds else None
        )


class ChatSession:
    """One conversation with one engine.

    Args:
        engine: answers.
        model: its name, for saved conversations.
        given: sampling parameters that win over the model's defaults.
        system: the system message, if any.
        context_shift: whether the oldest messages make room when the context is full.
        tools: functions that the model may call, in OpenAI's form.
    """

    def __init__(
        self,
        engine: LLMEngine,
        model: str,
        given: dict[str, Any],
        system: str | None,
        context_shift: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self.engine = engine
        self.model = model
        self.given = dict(given)
        self.system = system
        self.context_shift = context_shift
        self.tools = tools
        self.thinking: str | None = None
        """How much the model is to think, in the words of `set_thinking`; None for the template's default."""
        self.messages: list[dict[str, Any]] = []
        """Without the system message: exchanges of a user's message, an answer, and results of calls with further answers."""
        self._running: Batch | None = None
        self._interrupted = False

    # -- answers -----------------------------------------------------------------------------------------------------

    def ask(self, text: str, show: Show) -> AnswerStats:
        """Adds a message of the user and its answer; `show` gets the answer as it grows.

        Raises:
            OctavoError: there is no answer; the conversation is as before.
        """
        self.messages.append({"role": "user", "content": check_text("message", text)})
        return self._answer(show)

    def pending_calls(self) -> list[dict[str, Any]]:
        """Calls of the last answer that have no result yet."""
        for results, message in enumerate(reversed(self.messages)):
            if message["role"] != "tool":
                return list(message.get("tool_calls") or [])[results:]
        return []

    def add_result(self, text: str) -> int:
        """Adds the result of the first pending call; returns how many calls still wait.

        Raises:
            OctavoError: no call waits, or the result is no text.
        """
        pending = self.pending_calls()
        if not pending:
            raise ChatError("no call waits for a result")
        call, content = pending[0], check_text("result", text)
        name = call["function"]["name"]
        self.messages.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": content})
        return len(pending) - 1

    def go_on(self, show: Show) -> AnswerStats:
        """Adds the answer to the results of calls.

        Raises:
            OctavoError: there is no answer; the last result is taken back.
        """
        return self._answer(show)

    def regenerate(self, show: Show) -> AnswerStats:
        """Writes the last answer anew.

        Raises:
            OctavoError: there is none, or no answer; the conversation is as before.
        """
        if not self.messages:
            raise ChatError("there is no answer yet to write anew")
        before = list(self.messages)
        while self.messages.pop()["role"] != "assistant":
            pass
        try:
            return self._answer(show)
        except BaseException:
            self.messages = before
            raise

    def interrupt(self) -> None:
        """Ends the running answer; what is there of it stays. May be called from a signal handler."""
        self._interrupted = True
        if self._running is not None:
            for request_id in list(self._running.unfinished):
                self.engine.core.abort(request_id)

    def _answer(self, show: Show) -> AnswerStats:
        before = self.messages[:-1]
        self._interrupted = False
        try:
            submission, dropped = self._submission()
            stats, message = self._run(submission, dropped, show)
            if message == ChatMessage() and self._interrupted:
                raise ChatError("stopped before the first word; the conversation is as before")
        except BaseException:
            self.messages = before
            raise
        # A call that was cut is none, and templates refuse it.
        message.tool_calls = [call for call in message.tool_calls if _is_object(call.arguments)]
        self.messages.append(message.to_dict())
        return stats

    def _run(self, submission: Submission, dropped: int, show: Show) -> tuple[AnswerStats, ChatMessage]:
        start = time.perf_counter()
        first: float | None = None
        last, output = start, None
        with self.engine.submit([submission]) as batch:
            self._running = batch
            if self._interrupted:
                self.interrupt()
            try:
                for output in batch.updates():
                    if output.error is not None:
                        raise RequestError(output.error)
                    if output.outputs[0].token_ids:
                        last = time.perf_counter()
                        first = first or last
                    for delta in output.outputs[0].deltas:
                        show(delta)
            finally:
                self._running = None
        assert output is not None
        choice, prompt = output.outputs[0], len(submission.prompt_token_ids)
        assert choice.message is not None
        stats = AnswerStats(
            prompt_tokens=prompt,
            cached_tokens=output.num_cached_tokens,
            output_tokens=len(choice.token_ids),
            ttft=(first or last) - start,
            decode_seconds=last - (first or last),
            finish_reason=choice.finish_reason or "abort",
            context_used=prompt + len(choice.token_ids),
            context_size=self.engine.max_model_len,
            dropped_messages=dropped,
        )
        return stats, choice.message

    def _submission(self) -> tuple[Submission, int]:
        """The request for the next answer, and how many of the oldest messages had to go for it."""
        params, dropped = self.params(), 0
        while True:
            try:
                prompt = self.engine.render_chat(self.conversation(), **self._options())
                submission = self.engine.submission(prompt, params, stream=True)
                if not self._is_cramped(submission, params):
                    return submission, dropped
            except ContextLengthError as error:
                if not self.context_shift or len(self._exchanges()) < 2:
                    raise self._too_long(error) from error
            # A whole exchange, so that turns go on alternating.
            end = self._exchanges()[1]
            del self.messages[:end]
            dropped += end

    def _is_cramped(self, submission: Submission, params: SamplingParams) -> bool:
        """Whether the oldest messages should make more room for this answer."""
        if not self.context_shift or len(self._exchanges()) < 2:
            return False
        size = self.engine.max_model_len
        wanted = size // _ROOM_SHARE if params.max_tokens is None else min(params.max_tokens, size // 2)
        return size - len(submission.prompt_token_ids) < wanted

    def _too_long(self, error: ContextLengthError) -> ChatError:
        sizes = f"the context is full: {error.num_tokens:,} of {error.max_model_len:,} tokens with your message"
        if len(self._exchanges()) < 2:
            return ChatError(f"{sizes}; shorten it, or start with a larger --max-model-len if the model allows it")
        return ChatError(
            f"{sizes}, which is taken back; /undo takes back an exchange, /clear starts anew, and a chat started with "
            "--context-shift forgets its oldest messages"
        )

    # -- settings ----------------------------------------------------------------------------------------------------

    def params(self) -> SamplingParams:
        """What the next answer is drawn with."""
        return replace(self.engine.default_sampling_params(chat=True), **self.given)

    def set(self, name: str, value: Any) -> None:
        """Sets one sampling parameter.

        Raises:
            ParameterError: there is no such parameter, or the value is wrong; nothing has changed.
        """
        if name not in SETTABLE:
            raise ParameterError("/set", name, f"one of {', '.join(SETTABLE)}")
        self._try({**self.given, name: value})

    def unset(self, name: str) -> None:
        """Goes back to the model's default."""
        if name not in SETTABLE:
            raise ParameterError("/set", name, f"one of {', '.join(SETTABLE)}")
        self._try({key: value for key, value in self.given.items() if key != name})

    def set_thinking(self, value: str | None) -> None:
        """How much the model is to think before it answers; None leaves it to the template.

        Raises:
            ParameterError: the template has no such switch, or not this value; nothing has changed.
        """
        chat_format = self.engine.chat_format
        switch = None if chat_format is None else chat_format.thinking
        if value is not None and switch is None:
            raise ParameterError("think", value, "left out: the chat template of this model cannot switch its thinking")
        if value is not None and switch is not None and value not in switch.values:
            raise ParameterError("think", value, f"one of {', '.join(switch.values)}")
        self.thinking = value

    def _options(self) -> dict[str, Any]:
        """What the template gets besides the messages."""
        options: dict[str, Any] = {} if self.tools is None else {"tools": self.tools}
        switch = None if self.engine.chat_format is None else self.engine.chat_format.thinking
        if self.thinking is not None and switch is not None:
            options["chat_template_kwargs"] = {switch.name: switch.values[self.thinking]}
        return options

    def _try(self, given: dict[str, Any]) -> None:
        params = replace(self.engine.default_sampling_params(chat=True), **given)
        params.validate_for(self.engine.vocab_size, self.engine.config.max_logprobs)
        self.given = given

    # -- history -----------------------------------------------------------------------------------------------------

    def conversation(self) -> list[dict[str, Any]]:
        """All messages, the system's first."""
        head = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*head, *self.messages]

    def num_tokens(self) -> int:
        """Tokens of the conversation so far, as the template writes it."""
        if not self.conversation():
            return 0
        prompt = self.engine.render_chat(self.conversation(), add_generation_prompt=False, **self._options())
        return len(prompt.token_ids or [])

    @property
    def num_exchanges(self) -> int:
        """Messages of the user."""
        return len(self._exchanges())

    def _exchanges(self) -> list[int]:
        """Where exchanges begin in `messages`."""
        return [i for i, message in enumerate(self.messages) if message["role"] == "user"]

    def clear(self) -> None:
        """Forgets all messages but the system's."""
        self.messages = []

    def undo(self) -> str:
        """Takes back the last message of the user, with all that followed it, and returns it."""
        exchanges = self._exchanges()
        if not exchanges:
            raise ChatError("there is nothing to take back")
        user = self.messages[exchanges[-1]]
        del self.messages[exchanges[-1] :]
        return str(user["content"])

    def save(self, path: Path) -> None:
        """Writes messages and settings as JSON; replaces only a file that is a saved conversation.

        Raises:
            ChatError: it cannot be written, or would replace something else.
        """
        data = {"model": self.model, "messages": self.conversation(), "sampling": self.given}
        try:
            if path.exists():
                try:
                    _read(path)
                except ParameterError as error:
                    raise ChatError(f"{path} exists and is no saved conversation; choose another name") from error
            part = path.with_name(f"{path.name}.part")
            try:
                part.write_text(json.dumps(data, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
                os.replace(part, path)
            finally:
                with suppress(OSError):
                    part.unlink()
        except OSError as error:
            raise ChatError(f"{path} cannot be written ({error.strerror})") from error

    def load(self, path: Path) -> None:
        """Takes messages and settings of a saved conversation, or of a JSON list of messages.

        Raises:
            OctavoError: it cannot be read or used; nothing has changed.
        """
        messages, sampling = _read(path)
        unknown = [name for name in sampling if name not in SETTABLE]
        if unknown:
            raise ParameterError("sampling", unknown[0], f"made of {', '.join(SETTABLE)}")
        self._try(sampling)
        has_system = messages[:1] and messages[0]["role"] == "system"
        self.system = messages[0]["content"] if has_system else None
        self.messages = messages[1:] if has_system else messages


def _read(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages and sampling parameters of a file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ChatError(f"{path} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ParameterError("file", str(path), f"a saved conversation in JSON ({error})") from error
    found = value if isinstance(value, dict) else {"messages": value}
    sampling = found.get("sampling") or {}
    if not isinstance(sampling, dict):
        raise ParameterError("sampling", sampling, "an object of sampling parameters")
    given = found.get("messages")
    messages = check_messages(given) if given != [] else []
    turns = messages[1:] if messages[:1] and messages[0]["role"] == "system" else messages
    for i, message in enumerate(messages):
        calls = message.get("tool_calls")
        if calls is not None:
            _check_calls(f"messages[{i}].tool_calls", calls)
        if not calls or message.get("content") is not None:
            check_text(f"messages[{i}].content", message.get("content"))
    _check_roles([message["role"] for message in turns])
    return messages, sampling


def _check_roles(roles: list[str]) -> None:
    """Each message of the user has an answer; results of calls stand behind the answer that has the calls."""
    for before, role in zip(["start", *roles], [*roles, "end"], strict=True):
        if before not in _BEFORE.get(role, ()):
            wanted = "turns of user and assistant, in pairs, after at most one of the system"
            raise ParameterError("messages", roles, wanted)


def _check_calls(name: str, calls: Any) -> None:
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function") if isinstance(call, Mapping) and isinstance(call.get("id"), str) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ParameterError(name, calls, "a list of calls, each with 'id' and 'function'")


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
