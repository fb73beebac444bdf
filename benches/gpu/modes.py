"""What two settings of the engine cost and bring: `deterministic`, and the cascade pass of decode steps.

python -m benches.gpu.modes deterministic|cascade [--model llama-3-8b]

Each setting is measured against the same engine without it in the same run. The cascade pass reads the keys that all rows of a step
share once; measured are 64 requests with a common prompt of 8,192 tokens, and 64 that share nothing, which it must not slow down.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from typing import Any, Final
from unittest.mock import patch

from benches.gpu.models import SHAPES, random_llm
from benches.gpu.prefix import together
from benches.gpu.rows import Row, number, show
from benches.gpu.workload import decode_ms, offline, output_rate, prompts, timed
from octavo import LLM, startup

STEPS: Final = ((1, 128), (1, 8192), (64, 128), (64, 1024))
PREFILLS: Final = ((1, 1024), (1, 8192))
TINY_STEPS: Final = ((1, 64), (4, 64))
TINY_PREFILLS: Final = ((1, 64),)


def _figures(model: str, **settings: Any) -> dict[str, tuple[float, str]]:
    """Of an engine, named, with their units."""
    with random_llm(model, max_num_seqs=256, **settings) as llm:
        return _figures_of(llm, is_tiny=model == "tiny")


def _figures_of(llm: LLM, *, is_tiny: bool) -> dict[str, tuple[float, str]]:
    found = {}
    timed(llm, prompts(8, 40, 7), 20)
    for rows, context in TINY_STEPS if is_tiny else STEPS:
        found[f"decode step, batch {rows}, context {context}"] = (decode_ms(llm, rows, context, turns=3), "ms")
    for rows, length in TINY_PREFILLS if is_tiny else PREFILLS:
        seconds = [timed(llm, prompts(rows, length, turn), 1) for turn in range(4)]
        found[f"prefill {rows} x {length}"] = (statistics.median(seconds[1:]) * 1e3, "ms")
    work = offline(4, 4, 24) if is_tiny else offline(256)
    found[f"offline-{len(work.ids)}"] = (output_rate(llm, work), "tok/s")
    return found


def deterministic_rows(model: str = "llama-3-8b", **settings: Any) -> Iterator[Row]:
    """With the setting; the figure without it beside each."""
    figures = {wanted: _figures(model, deterministic=wanted, **settings) for wanted in (False, True)}
    for name, (value, unit) in figures[True].items():
        plain, _ = figures[False][name]
        cost = value / plain if unit == "ms" else plain / value
        more = {"without": f"{number(plain)} {unit}", "times as long": number(cost)}
        yield Row(f"{model}, deterministic, {name}", value, unit, more=more)


def shared_step_ms(llm: LLM, rows: int, shared: int, own: int = 32, turns: int = 3) -> float:
    """Of a decode step whose rows have `shared` tokens in common."""
    few, many = 9, 73

    def one(turn: int) -> float:
        ids = together(rows, shared, own, 100 + turn)
        # The common prompt's blocks are in the cache then, for both.
        timed(llm, ids, 1)
        return (timed(llm, ids, many) - timed(llm, ids, few)) / (many - few) * 1e3

    return statistics.median(one(turn) for turn in range(turns))


def _cascade_ms(model: str, count: int, shared: int, apart: int, cascade: bool, **settings: Any) -> tuple[float, float]:
    """Steps of rows that share a prompt, and of rows that share nothing."""
    with (
        patch.object(startup, "_CASCADE", cascade),
        random_llm(model, enable_prefix_caching=True, max_num_seqs=count, **settings) as llm,
    ):
        timed(llm, prompts(count, 40, 7), 20)
        return shared_step_ms(llm, count, shared), decode_ms(llm, count, apart, turns=3)


def cascade_rows(
    model: str = "llama-3-8b", count: int = 64, shared: int = 8192, apart: int = 128, **settings: Any
) -> Iterator[Row]:
    """Steps of rows that share a prompt, and of rows that share nothing, with the pass and without."""
    found = {wanted: _cascade_ms(model, count, shared, apart, wanted, **settings) for wanted in (False, True)}
    for at, name in enumerate((f"{shared} common tokens", f"context {apart}, nothing in common")):
        plain, cascade = found[False][at], found[True][at]
        more = {"without": f"{number(plain)} ms", "without / with": number(plain / cascade)}
        yield Row(f"{model}, decode step of {count} rows, {name}, cascade", cascade, "ms", more=more)


ROWS: Final = {"deterministic": deterministic_rows, "cascade": cascade_rows}


def rows(mode: str, **settings: Any) -> Iterator[Row]:
    """Of one setting."""
    return ROWS[mode](**settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=sorted(ROWS))
    parser.add_argument("--model", default="llama-3-8b", choices=sorted(SHAPES))
    args = parser.parse_args()
    show(rows(args.mode, model=args.model))


if __name__ == "__main__":
    main()
