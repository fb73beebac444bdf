"""What a benchmark of this folder returns: rows that say what was measured, what was demanded, and what is possible."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

HIGHER_IS_BETTER = ("TFLOP/s", "TB/s", "GB/s", "tok/s", "x", "% of rate")


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. Units of `HIGHER_IS_BETTER` are rates, the others times or shares of which less is better."""

    what: str
    measured: float
    unit: str
    demanded: float | None = None
    peer: float | None = None
    """The best one's figure."""
    peer_name: str = ""
    limit: float | None = None
    """What the machine could do at best."""
    more: dict[str, str] = field(default_factory=dict)
    """Further columns."""

    @property
    def is_rate(self) -> bool:
        """Whether more is better."""
        return self.unit in HIGHER_IS_BETTER

    @property
    def of_limit(self) -> float | None:
        """Share of what is possible, at most 1 unless the limit is none."""
        if not self.limit or not self.measured:
            return None
        return self.measured / self.limit if self.is_rate else self.limit / self.measured

    @property
    def is_met(self) -> bool | None:
        """Whether the demand is; None where there is none."""
        if self.demanded is None:
            return None
        return self.measured >= self.demanded if self.is_rate else self.measured <= self.demanded

    def as_json(self) -> dict[str, Any]:
        """All fields and what follows from them."""
        return {**asdict(self), "of_limit": self.of_limit, "is_met": self.is_met}

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> Row:
        """From `as_json`."""
        return cls(**{name: value for name, value in values.items() if name not in ("of_limit", "is_met")})


def number(value: float | None) -> str:
    """Three or four digits, thousands apart; nothing for None."""
    if value is None:
        return ""
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 20 else 2 if size >= 0.1 or not size else 4
    return f"{value:,.{digits}f}"


def line(row: Row) -> str:
    """For a terminal."""
    parts = [f"{row.what:44s} {number(row.measured):>9s} {row.unit:8s}"]
    if row.demanded is not None:
        sign = ">=" if row.is_rate else "<="
        parts.append(f"{sign} {number(row.demanded):>7s} {'met' if row.is_met else 'MISSED':6s}")
    if row.peer is not None:
        parts.append(f"{row.peer_name or 'best peer'} {number(row.peer)}")
    if row.limit is not None:
        parts.append(f"limit {number(row.limit)}, {row.of_limit or 0:.0%} of it")
    parts += [f"{name} {value}" for name, value in row.more.items()]
    return "  ".join(parts)


def shown(rows: Iterable[Row], file: TextIO | None = None) -> Iterator[Row]:
    """The rows again, each printed and, if there is a file, written to it as a line of JSON when it is there."""
    for row in rows:
        print(line(row), flush=True)
        if file is not None:
            print(json.dumps(row.as_json()), file=file, flush=True)
        yield row


def show(rows: Iterable[Row]) -> None:
    """Prints the rows."""
    for _ in shown(rows):
        pass


def table(rows: list[Row]) -> str:
    """In Markdown; columns that no row uses are left out."""
    extra = list(dict.fromkeys(name for row in rows for name in row.more))
    has = {
        "demanded": any(row.demanded is not None for row in rows),
        "best peer": any(row.peer is not None for row in rows),
        "limit": any(row.limit is not None for row in rows),
        "of the limit": any(row.limit is not None for row in rows),
    }
    names = ["what", "measured", *(name for name, wanted in has.items() if wanted), *extra]
    lines = [f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"]
    for row in rows:
        value = f"{number(row.measured)} {row.unit}"
        sign = "≥" if row.is_rate else "≤"
        cells = {
            "what": row.what,
            "measured": f"**{value}**" if row.is_met else value,
            "demanded": "" if row.demanded is None else f"{sign} {number(row.demanded)}",
            "best peer": "" if row.peer is None else f"{number(row.peer)} {row.peer_name}".strip(),
            "limit": number(row.limit),
            "of the limit": "" if row.of_limit is None else f"{row.of_limit:.0%}",
            **row.more,
        }
        lines.append(f"| {' | '.join(cells.get(name, '') for name in names)} |")
    return "\n".join(lines)
