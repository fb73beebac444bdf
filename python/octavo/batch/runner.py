"""Runs a batch: keeps the engine full of requests and writes each result when it is complete."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from octavo.batch.bodies import ChatBody
from octavo.batch.replies import Echo, chat_reply, completion_reply
from octavo.batch.results import Results
from octavo.batch.source import Entry, line_error
from octavo.errors import EngineError, OctavoError, ParameterError, RequestError
from octavo.llm_engine import LLMEngine
from octavo.outputs import RequestOutput
from octavo.requests import Batch, RequestAssembler, Submission

_WAIT_SECONDS: Final = 0.2
"""How long the end of a request, or a stop, may go unnoticed."""


@dataclass(slots=True)
class _Flight:
    """One line on its way through the engine: a request for each of its prompts."""

    entry: Entry
    outputs: list[RequestOutput] = field(default_factory=list)
    unfinished: int = 0


class BatchRunner:
    """Feeds entries to an engine.

    Args:
        engine: where they run.
        model: what replies call it.
        results: where they go; what is there already is skipped.
        limit: requests in the engine at once.
        progress: called for each line that has come to an end, with whether it has a new result.
    """

    def __init__(
        self, engine: LLMEngine, model: str, results: Results, limit: int, progress: Callable[[bool], None]
    ) -> None:
        self._engine = engine
        self._model = model
        self._results = results
        self._limit = limit
        self._progress = progress
        self._flights: dict[int, _Flight] = {}
        self._stopping = 0
        self.other_models: set[str] = set()
        """Models that bodies named and that are not the one which answered."""
        self.skipped = 0
        """Lines whose results were there."""

    def stop(self) -> int:
        """Takes no further line; the second call gives up those that run. Returns the number of the call."""
        self._stopping += 1
        return self._stopping

    def run(self, entries: Iterator[Entry]) -> bool:
        """Runs all entries; `False` if it was stopped before the end.

        Raises:
            EngineError: the engine has failed; the results so far are in the file.
        """
        ended = False
        with Batch(self._engine.core, self._engine.core.mailbox()) as batch:
            while self._stopping < 2:
                while not ended and not self._stopping and len(batch.unfinished) < self._limit:
                    entry = next(entries, None)
                    if entry is None:
                        ended = True
                    else:
                        self._start(entry, batch)
                if not batch.unfinished and (ended or self._stopping):
                    break
                self._collect(batch)
        return ended and not batch.unfinished

    def _start(self, entry: Entry, batch: Batch) -> None:
        done = self._results.custom_ids if self._is_keyed(entry) else self._results.result_ids
        if (entry.custom_id if self._is_keyed(entry) else entry.result_id) in done:
            self.skipped += 1
            self._progress(False)
            return
        if entry.error is not None:
            self._write(entry, *entry.error)
            return
        added: list[int] = []
        try:
            submissions = self._submissions(entry)
            flight = _Flight(entry)
            for submission in submissions:
                request_id = self._engine.add(submission, batch.mailbox)
                assembler = RequestAssembler(request_id, submission, self._engine.tokenizer)
                batch.assemblers[request_id] = assembler
                batch.unfinished.add(request_id)
                self._flights[request_id] = flight
                flight.outputs.append(assembler.output)
                flight.unfinished += 1
                added.append(request_id)
        except EngineError:
            raise
        except OctavoError as error:
            for request_id in added:  # the line fails whole
                self._engine.core.abort(request_id)
                batch.unfinished.discard(request_id)
                del batch.assemblers[request_id], self._flights[request_id]
            self._write(entry, *line_error(entry.line, error))

    @staticmethod
    def _is_keyed(entry: Entry) -> bool:
        """Whether the line's `custom_id` names its result: not if there is none, or an earlier line has it."""
        if entry.custom_id is None:
            return False
        return entry.error is None or entry.error[1]["error"]["code"] != "duplicate_custom_id"

    def _submissions(self, entry: Entry) -> list[Submission]:
        """The requests of a line, all checked before the first of them runs."""
        body = entry.body
        assert body is not None
        if body.model is not None and body.model != self._model:
            self.other_models.add(body.model)
        try:
            prompts = (
                [self._engine.render_chat(body.messages, **body.template)]
                if isinstance(body, ChatBody)
                else self._engine.tokenize(body.prompts)
            )
            return [
                self._engine.submission(prompt, body.params, priority=body.priority, cache_salt=body.cache_salt)
                for prompt in prompts
            ]
        except ParameterError as error:
            # The body's name for it.
            if isinstance(body, ChatBody) and error.param == "logprobs":
                raise ParameterError("top_logprobs", error.value, error.allowed) from error
            raise

    def _collect(self, batch: Batch) -> None:
        for update in batch.mailbox.receive(_WAIT_SECONDS):
            assembler = batch.assemblers.get(update.request_id)
            if assembler is None:
                continue
            output = assembler.merge(update)
            if output.error is not None and self._engine.core.is_shut_down():
                raise EngineError(f"request {output.request_id}: {output.error}")
            if not output.finished:
                continue
            batch.unfinished.discard(update.request_id)
            del batch.assemblers[update.request_id]
            flight = self._flights.pop(update.request_id)
            flight.unfinished -= 1
            if flight.unfinished == 0:
                self._finish(flight)

    def _finish(self, flight: _Flight) -> None:
        failed = next((output.error for output in flight.outputs if output.error is not None), None)
        if failed is not None:
            self._write(flight.entry, *line_error(flight.entry.line, RequestError(failed)))
            return
        body, reply_id = flight.entry.body, secrets.token_hex(12)
        if isinstance(body, ChatBody):
            reply = chat_reply(
                reply_id,
                self._model,
                flight.outputs[0],
                body.params.logprobs or 0,
                parallel_tool_calls=body.parallel_tool_calls,
                names_function=body.names_function,
            )
        else:
            echoes = [self._echo(output) for output in flight.outputs] if body is not None and body.echo else None
            reply = completion_reply(reply_id, self._model, flight.outputs, echoes)
        self._write(flight.entry, 200, reply)

    def _echo(self, output: RequestOutput) -> Echo:
        tokenizer = self._engine.require_tokenizer()
        ids = output.prompt_token_ids
        text = output.prompt if output.prompt is not None else tokenizer.decode(ids)
        return Echo(text, [tokenizer.token_bytes(token) for token in ids])

    def _write(self, entry: Entry, status: int, body: dict[str, Any]) -> None:
        self._results.write(entry.result_id, entry.custom_id, status, f"req_{secrets.token_hex(12)}", body)
        self._progress(True)
