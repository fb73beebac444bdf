"""`octavo batch`: answers a file of requests in OpenAI's batch format."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from octavo.cli.options import engine_options
from octavo.config import EngineConfig
from octavo.errors import ParameterError


@engine_options
def batch(
    config: EngineConfig,
    source: Path = typer.Argument(..., metavar="INPUT.jsonl", help="Requests, one a line."),
    output: Path = typer.Argument(..., metavar="OUTPUT.jsonl", help="Results, one a line, as they are ready."),
    model: str | None = typer.Argument(None, help="Model: built-in name, hub id, folder or .gguf file."),
    restart: bool = typer.Option(False, "--restart", help="Forget the results in the output file."),
    max_requests_in_flight: int | None = typer.Option(
        None, help="Requests given to the engine at once; a quarter more than it runs at once by default."
    ),
) -> None:
    """Answer a file of requests in OpenAI's batch format.

    Each line of the input is an object like

    \b
      {"custom_id": "a1", "method": "POST", "url": "/v1/chat/completions",
       "body": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}}

    The url may also be /v1/completions. A chat may offer tools; calls and reasoning come apart from the content. Each result
    is a line

    \b
      {"id": ..., "custom_id": "a1", "response": {"status_code": 200, "request_id": ..., "body": {...}}, "error": null}

    in the order in which answers are ready. A wrong line gives a result with a status of 4xx and an error; the others run.

    The same command run again after an interruption goes on where it stopped: results that are in the output are not
    computed again.

    Exit code: 0 if every result is an answer, 1 if some are errors, 2 if nothing could be run, 130 if interrupted.

    \b
    Examples:
      octavo batch questions.jsonl answers.jsonl
      octavo batch questions.jsonl answers.jsonl org/model --max-model-len 4096
      octavo batch questions.jsonl answers.jsonl --restart
    """
    if max_requests_in_flight is not None and max_requests_in_flight < 1:
        raise ParameterError("max_requests_in_flight", max_requests_in_flight, "at least 1")
    with _open(source) as file:
        if output.exists() and os.path.samefile(source, output):
            raise ParameterError("output", str(output), "another file than the input")
        from octavo.batch.results import Results  # noqa: PLC0415

        try:
            results = Results(output, restart=restart)
        except OSError as error:
            raise ParameterError("output", str(output), f"a file that can be written ({error.strerror})") from error
        limit = max_requests_in_flight or config.max_num_seqs + config.max_num_seqs // 4
        with results:
            raise typer.Exit(_run(config, source, file, results, limit))


def _open(source: Path) -> BinaryIO:
    try:
        return source.open("rb")
    except OSError as error:
        raise ParameterError("input", str(source), f"a readable file ({error.strerror})") from error


def _run(config: EngineConfig, source: Path, file: BinaryIO, results: Any, limit: int) -> int:
    """Runs the batch and returns the exit code."""
    from octavo.batch.runner import BatchRunner  # noqa: PLC0415  loads torch
    from octavo.batch.source import Defaults, count_lines, read_entries  # noqa: PLC0415
    from octavo.llm import LLM  # noqa: PLC0415

    config.disable_log_stats = config.disable_log_stats or not sys.stderr.isatty()
    with LLM.from_config(config) as llm:
        engine, resumed = llm.engine, results.written
        defaults = Defaults(engine.default_sampling_params(chat=True), engine.default_sampling_params())
        with _Progress(count_lines(source), llm) as progress:
            runner = BatchRunner(engine, config.model, results, limit, progress.advance)
            with _interrupts(runner, progress):
                whole = runner.run(read_entries(file, defaults))
        if runner.other_models:
            names = ", ".join(sorted(runner.other_models)[:3])
            _say(f"the input names other models ({names}); all of it was answered by {config.model}")
        _say(
            f"{results.written - resumed:,} results written ({runner.skipped:,} were there), {results.errors:,} errors, "
            f"{progress.summary()}: {results.path}"
        )
        if not whole:
            _say("stopped before the end; the same command goes on where it stopped")
            return 130
    return 1 if results.errors else 0


@contextmanager
def _interrupts(runner: Any, progress: _Progress) -> Iterator[None]:
    """Ctrl-C and SIGTERM stop the batch between two lines; the second time at once."""

    def stop(*_: object) -> None:
        if runner.stop() == 1:
            progress.note("finishing the requests that run; again to stop at once")

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Progress:
    """Lines done, tokens a second and time left: a bar on a terminal, nothing elsewhere."""

    def __init__(self, total: int, llm: Any) -> None:
        self._llm = llm
        self._total = total
        self._start = time.perf_counter()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[rate]}"),
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
            get_time=time.perf_counter,
        )
        self._task = self._progress.add_task("batch", total=total, rate="")

    def __enter__(self) -> _Progress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, is_new: bool) -> None:
        """Notes a line that has come to an end; one whose result was there is no part of the work."""
        if is_new:
            self._progress.update(self._task, advance=1, rate=f"{self._rate():,.0f} tokens/s")
        else:
            self._total -= 1
            self._progress.update(self._task, total=self._total)

    def note(self, text: str) -> None:
        """Says something that must be read now."""
        if self._progress.disable:
            _say(text)
        else:
            self._progress.console.print(f"octavo: {text}", highlight=False)

    def summary(self) -> str:
        """Tokens, and how fast."""
        return f"{self._tokens():,} output tokens in {time.perf_counter() - self._start:.1f} s ({self._rate():,.0f}/s)"

    def _tokens(self) -> int:
        return int(self._llm.stats()["generation_tokens"])

    def _rate(self) -> float:
        return self._tokens() / max(time.perf_counter() - self._start, 1e-6)


def _say(text: str) -> None:
    print(f"octavo: {text}", file=sys.stderr, flush=True)
