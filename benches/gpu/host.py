"""What a decode step costs the host, and how long the GPU waits between steps.

python -m benches.gpu.host [--model llama-3-8b] [--rows 256]

The engine's loop runs on a core and a runner that note the time of each call. A step's host time is from one `schedule` to the next
without the wait for the device's event: plan, upload, launch, draw, reading back, commit and the loop. Only steps of all rows
with one token each count. With two steps in flight this time is hidden as long as the loop waits for the device at all.

The GPU's idle time is that between the end of what ran before a step's plan is copied and the beginning of what runs after it, in
the trace of a steady window, by the profiler in a run of its own.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from benches.gpu.models import SHAPES, random_llm
from benches.gpu.profile import Span, device_spans
from benches.gpu.rows import Row, number, show
from benches.gpu.workload import prompts, timed
from octavo.engine import loop
from octavo.engine.plan import StepPlan, StepResult

CONTEXT = 128
NEW_TOKENS = 120
DEMANDED_MS = 0.4
DEMANDED_IDLE = 1.0


@dataclass(slots=True)
class Iteration:
    """One turn of the loop, in seconds."""

    begin: float
    rows: int = 0
    tokens: int = 0
    parts: dict[str, float] = field(default_factory=dict)


class Clock:
    """The turns of a loop, in their order."""

    def __init__(self) -> None:
        self.turns: list[Iteration] = []

    def timed(self, part: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Runs it and adds its time to the turn's `part`."""
        began = time.perf_counter()
        result = call(*arguments)
        parts = self.turns[-1].parts
        parts[part] = parts.get(part, 0.0) + time.perf_counter() - began
        return result

    def host_ms(self, rows: int, since: int) -> tuple[list[float], dict[str, list[float]]]:
        """Of each full decode step from a turn on: its host time, and its parts."""
        whole: list[float] = []
        parts: dict[str, list[float]] = {}
        for turn, following in itertools.pairwise(self.turns[since:]):
            if turn.rows == turn.tokens == rows == following.rows == following.tokens:
                whole.append((following.begin - turn.begin - turn.parts.get("device", 0.0)) * 1e3)
                for name, seconds in turn.parts.items():
                    parts.setdefault(name, []).append(seconds * 1e3)
        return whole, parts


class TimedCore:
    """The control plane behind a clock."""

    def __init__(self, core: Any, clock: Clock) -> None:
        self._core, self._clock = core, clock
        self.is_shut_down, self.wait, self.masks = core.is_shut_down, core.wait, core.masks

    def schedule(self, buffer: Any) -> bool:
        self._clock.turns.append(Iteration(time.perf_counter()))
        return bool(self._clock.timed("schedule", self._core.schedule, buffer))

    def commit(self, *arguments: Any) -> None:
        self._clock.timed("commit", self._core.commit, *arguments)


class TimedStep:
    """A step behind a clock: the wait for the device apart from what comes after it."""

    def __init__(self, step: Any, clock: Clock) -> None:
        self._step, self._clock = step, clock
        self.step_id, self.num_rows, self.mask_after_step = step.step_id, step.num_rows, step.mask_after_step
        self.sampled = False

    def sample(self, masks: Any = None) -> None:
        self.sampled = True
        self._clock.timed("draw", self._step.sample, masks)

    def wait(self) -> StepResult:
        if self._step._done is not None:
            self._clock.timed("device", self._step._done.synchronize)
        result: StepResult = self._clock.timed("read back", self._step.wait)
        return result


class TimedRunner:
    """A runner behind a clock."""

    def __init__(self, runner: Any, clock: Clock) -> None:
        self._runner, self._clock = runner, clock

    def forward(self, plan: StepPlan) -> TimedStep:
        turn = self._clock.turns[-1]
        turn.rows, turn.tokens = plan.num_rows, plan.num_tokens
        return TimedStep(self._clock.timed("launch", self._runner.forward, plan), self._clock)


@contextmanager
def timed_loop() -> Iterator[Clock]:
    """Engines that are made inside note the time of their loops' calls."""
    clock, run = Clock(), loop.run

    def timed_run(core: Any, runner: Any, plans: Any, max_in_flight: int) -> None:
        run(TimedCore(core, clock), TimedRunner(runner, clock), plans, max_in_flight)  # type: ignore[arg-type]

    with patch.object(loop, "run", timed_run):
        yield clock


def idle_shares(spans: list[Span]) -> tuple[float, float]:
    """Shares of the middle of a trace in which nothing ran: around the copies of plans, and at all."""
    spans = spans[len(spans) // 2 : -len(spans) // 20]
    around = idle = 0.0
    last, was_copy = spans[0].end, False
    for span in spans[1:]:
        is_copy = "HtoD" in span.name
        gap = max(0.0, span.start - last)
        idle += gap
        around += gap if is_copy or was_copy else 0.0
        last, was_copy = max(last, span.end), is_copy
    whole = last - spans[0].start
    return around / whole, idle / whole


def rows(model: str = "llama-3-8b", count: int = 256, **settings: Any) -> Iterator[Row]:
    """Host time, then idle time."""
    is_known = model == "llama-3-8b"
    # Kept for the engine's life: its loop looks the clock up once.
    with timed_loop() as clock, random_llm(model, max_num_seqs=count, **settings) as llm:
        timed(llm, prompts(count, CONTEXT, 1), 20)
        since = len(clock.turns)
        timed(llm, prompts(count, CONTEXT, 2), NEW_TOKENS)
        whole, parts = clock.host_ms(count, since)
        shown = {f"{name}, ms": f"{statistics.median(times):.3f}" for name, times in parts.items()}
        yield Row(
            f"{model}, host time of a decode step of {count} rows", statistics.median(whole), "ms",
            DEMANDED_MS, more={"99th percentile, ms": number(sorted(whole)[len(whole) * 99 // 100]), **shown},
        )  # fmt: skip
        if llm.engine.device_type != "cuda":
            return
        spans = device_spans(lambda: timed(llm, prompts(count, CONTEXT, 3), NEW_TOKENS))
        between, at_all = idle_shares(spans)
        yield Row(
            f"{model}, GPU idle between decode steps of {count} rows", between * 100, "%",
            DEMANDED_IDLE if is_known else None, more={"idle at all, %": number(at_all * 100)},
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-8b", choices=sorted(SHAPES))
    parser.add_argument("--rows", type=int, default=256)
    args = parser.parse_args()
    show(rows(args.model, args.rows))


if __name__ == "__main__":
    main()
