"""Concurrent inference for asyncio programs: the same engine as `LLM`, one stream a request."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from octavo._core import EngineCore, Mailbox, Update
from octavo.config import DEFAULT_MODEL
from octavo.errors import EngineError, RequestError
from octavo.inputs import ChatOptions, Message, Prompt, PromptType, check_messages, parse_prompt
from octavo.llm_engine import LLMEngine
from octavo.outputs import RequestOutput
from octavo.requests import RequestAssembler
from octavo.sampling_params import SamplingParams

_POLL_SECONDS = 0.2

Queues = dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Queue[Update]]]


class AsyncLLM:
    """An engine whose requests are awaited; arguments as for `LLM`.

    Example:
        >>> async for output in llm.generate("Once", SamplingParams(max_tokens=20)):
        ...     print(output.outputs[0].text)
    """

    def __init__(self, model: str = DEFAULT_MODEL, **kwargs: Any) -> None:
        self.engine = LLMEngine.from_kwargs(model=model, **kwargs)
        self._mailbox = self.engine.core.mailbox()
        self._queues: Queues = {}
        self._lock = threading.Lock()
        # Not a bound method: a running thread must not keep a forgotten engine alive.
        parts = (self.engine.core, self._mailbox, self._queues, self._lock)
        self._pump = threading.Thread(target=deliver, args=parts, name="octavo-updates", daemon=True)
        self._pump.start()
        # Also at exit: a thread that comes back from Rust to an interpreter that is gone ends the process.
        self._stop = weakref.finalize(self, _stop, self.engine.core, self._pump)

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yields the output, one object that grows, until it is finished. Leaving or cancelling the iteration aborts the request.

        Raises:
            ParameterError: prompt or parameters are wrong.
            RequestError: this request failed in the engine.
        """
        params = self.engine.default_sampling_params() if sampling_params is None else sampling_params
        parsed = parse_prompt(prompt)
        async for output in self._stream(lambda: parsed, params, priority, cache_salt, tenant):
            yield output

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
        **options: Any,
    ) -> AsyncIterator[RequestOutput]:
        """As `generate`, for a conversation; without `max_tokens` the answer may use the rest of the context.

        Each choice has a `message` that grows, and in `deltas` what it has more than in the output yielded before.

        Args:
            messages: the conversation.
            sampling_params: the model's defaults if not given.
            priority: lower runs first.
            cache_salt: prefixes are shared only among requests with the same salt.
            tenant: whom the request belongs to.
            **options: fields of `octavo.inputs.ChatOptions`: `tools`, `chat_template_kwargs`, …
        """
        params = self.engine.default_sampling_params(chat=True) if sampling_params is None else sampling_params
        conversation, chat_options = check_messages(messages), ChatOptions(**options)
        render = lambda: self.engine.render_chats([conversation], chat_options)[0]  # noqa: E731
        async for output in self._stream(render, params, priority, cache_salt, tenant):
            yield output

    def stats(self) -> dict[str, float]:
        """Counters of the control plane."""
        return self.engine.core.stats()

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix."""
        self.engine.core.reset_prefix_cache()

    def shutdown(self) -> None:
        """Stops the engine; unfinished requests end with `abort`."""
        self._stop()
        self.engine.shutdown()

    async def _stream(
        self,
        make_prompt: Callable[[], Prompt],
        params: SamplingParams,
        priority: int,
        cache_salt: str | None,
        tenant: str | None,
    ) -> AsyncIterator[RequestOutput]:
        loop = asyncio.get_running_loop()
        # Rendering and tokenization of a long prompt must not stop the other streams.
        submission = await loop.run_in_executor(
            None,
            lambda: self.engine.submission(
                make_prompt(), params, priority=priority, cache_salt=cache_salt, tenant=tenant, stream=True
            ),
        )
        queue: asyncio.Queue[Update] = asyncio.Queue()
        with self._lock:  # the pump must find the queue when the first update comes
            request_id = self.engine.add(submission, self._mailbox)
            self._queues[request_id] = (loop, queue)
        assembler = RequestAssembler(request_id, submission, self.engine.tokenizer)
        finished = False
        try:
            while not finished:
                updates = [await queue.get()]
                while not queue.empty():  # a slow reader gets one larger output, not a backlog
                    updates.append(queue.get_nowait())
                output = assembler.merge(*updates)
                finished = output.finished
                if output.error is not None:
                    kind = EngineError if self.engine.core.is_shut_down() else RequestError
                    raise kind(f"request {output.request_id}: {output.error}")
                yield output
        finally:
            with self._lock:
                self._queues.pop(request_id, None)
            if not finished:
                self.engine.core.abort(request_id)


def deliver(core: EngineCore, mailbox: Mailbox, queues: Queues, lock: threading.Lock) -> None:
    """Hands updates from Rust to the event loops until the engine has ended; runs on a thread of its own."""
    while True:
        # Asked before the wait: what comes with the end is still delivered.
        ended = core.is_shut_down()
        updates = mailbox.receive(_POLL_SECONDS)
        if ended and not updates:
            return
        for update in updates:
            with lock:
                target = queues.get(update.request_id)
            if target is None:
                continue
            try:
                target[0].call_soon_threadsafe(target[1].put_nowait, update)
            except RuntimeError:  # its event loop is closed: nobody will read it
                with lock:
                    queues.pop(update.request_id, None)
                core.abort(update.request_id)


def _stop(core: EngineCore, pump: threading.Thread) -> None:
    core.shut_down()
    # A garbage collection may run this on the pump's own thread.
    if pump is not threading.current_thread():
        pump.join(timeout=60)
