"""Progress bars of long work: shown on a terminal, silent elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn, track

from octavo.outputs import RequestOutput

Item = TypeVar("Item")


class RequestProgress:
    """Counts finished requests and shows input and output tokens a second."""

    def __init__(self, total: int, enabled: bool) -> None:
        shown = enabled and sys.stderr.isatty()
        self._start = time.perf_counter()
        self._input_tokens = 0
        self._output_tokens = 0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[rate]}"),
            console=Console(stderr=True),
            disable=not shown,
        )
        self._task = self._progress.add_task("requests", total=total, rate="")

    def __enter__(self) -> RequestProgress:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    def advance(self, output: RequestOutput) -> None:
        """Notes one finished request."""
        self._input_tokens += len(output.prompt_token_ids)
        self._output_tokens += sum(len(choice.token_ids) for choice in output.outputs)
        seconds = max(time.perf_counter() - self._start, 1e-6)
        rate = f"in {self._input_tokens / seconds:,.0f} tok/s, out {self._output_tokens / seconds:,.0f} tok/s"
        self._progress.update(self._task, advance=1, rate=rate)


def tracked(description: str, items: Sequence[Item], enabled: bool) -> Iterable[Item]:
    """The items, with a bar on a terminal that shows how many were taken."""
    shown = enabled and sys.stderr.isatty()
    return track(items, description, console=Console(stderr=True), disable=not shown)
