"""What a verification found: checks with what was measured, what is allowed, and a verdict."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

Verdict = Literal["ok", "differs", "not verified"]
EXIT_STATUS: Final[dict[Verdict, int]] = {"ok": 0, "differs": 1, "not verified": 2}
_STYLE: Final[dict[Verdict, str]] = {"ok": "green", "differs": "bold red", "not verified": "yellow"}
_PIPED_WIDTH: Final = 200


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison."""

    part: str
    """What of octavo was compared: `tokenizer`, `exact path`, or the path as it runs."""
    what: str
    value: float | None
    """What was measured; None: nothing could be."""
    limit: float
    measured: str
    """`value` for people."""
    allowed: str
    """`limit` for people."""
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Report:
    """All checks of one model."""

    model: str
    path: str
    oracle: str
    tokens: int
    """Tokens of text that were scored."""
    checks: tuple[Check, ...]
    notes: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        """`differs` if anything does, else `not verified` if anything could not be compared."""
        found = {check.verdict for check in self.checks}
        return "differs" if "differs" in found else "not verified" if "not verified" in found or not found else "ok"

    def as_json(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return {**asdict(self), "verdict": self.verdict}


def at_most(part: str, what: str, value: float, limit: float, form: str) -> Check:
    """A check that passes up to and including the limit; NaN differs."""
    return _check(part, what, value, limit, form, f"≤ {limit:{form}}", value <= limit)


def at_least(part: str, what: str, value: float, limit: float, form: str) -> Check:
    """A check that passes from the limit; NaN differs."""
    return _check(part, what, value, limit, form, f"≥ {limit:{form}}", value >= limit)


def not_verified(part: str, what: str, limit: float, allowed: str, reason: str) -> Check:
    """A comparison that could not be made."""
    return Check(part, what, None, limit, reason, allowed, "not verified")


def _check(part: str, what: str, value: float, limit: float, form: str, allowed: str, passed: bool) -> Check:
    return Check(part, what, value, limit, f"{value:{form}}", allowed, "ok" if passed else "differs")


def print_report(report: Report) -> None:
    """A table and the verdict on standard output; plain and unfolded where that is no terminal."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPED_WIDTH)
    console.print(f"{report.model} ({report.path})", style="bold", markup=False)
    console.print(f"against {report.oracle}; {report.tokens:,} tokens of text", markup=False)
    table = Table(box=None, padding=(0, 2))
    table.add_column("part", no_wrap=True)
    table.add_column("what", no_wrap=True)
    table.add_column("measured", overflow="fold")
    table.add_column("allowed", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for check in report.checks:
        cells = [check.part, check.what, check.measured, check.allowed]
        table.add_row(*map(Text, cells), Text(check.verdict, style=_STYLE[check.verdict]))
    console.print(table)
    for note in report.notes:
        console.print(note, markup=False)
    console.print(Text(_conclusion(report), style=_STYLE[report.verdict]))


def _conclusion(report: Report) -> str:
    if report.verdict == "ok":
        return "verified: octavo agrees with transformers on this machine"
    wanting: Sequence[Check] = [check for check in report.checks if check.verdict == report.verdict]
    named = ", ".join(dict.fromkeys(f"{check.part} ({check.what})" for check in wanting))
    return f"{'octavo differs' if report.verdict == 'differs' else 'not verified'}: {named}"
