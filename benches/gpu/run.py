"""Every GPU benchmark in one run, and the table of docs/performance.md.

    python -m benches.gpu.run --list
    python -m benches.gpu.run                                  # all sections, about half an hour on one H200
    python -m benches.gpu.run --only llama,prefill --out /tmp/figures.json
    python -m benches.gpu.run --merge /tmp/figures.json        # runs nothing: figures of another machine come into the table

Each section is a process of its own with a time limit: it begins with a clean device, and what fails or takes too long is reported
and does not stop the others; the rows that it had made until then are kept. The figures go to `--out` as JSON, where those of
sections that did not run now stay from the run before; all of them together are written between the markers of `--doc`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from benches.gpu.rows import Row, number, shown, table

BEGIN: Final = "<!-- gpu:begin -->"
END: Final = "<!-- gpu:end -->"
ROOT: Final = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Section:
    """A module whose `rows` makes the section's rows."""

    title: str
    module: str
    seconds: int
    """The time limit; a run takes half of it or less once kernels are on disk."""
    arguments: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    """What a reader must know to understand the rows."""


_STEPS: Final = (
    "Random weights, bf16, blocks of 16, CUDA graphs, two steps in flight. "
    "Best peer: the better of vLLM 0.26.0 and SGLang 0.5.17."
)
SECTIONS: Final[dict[str, Section]] = {
    "llama": Section("Llama-3-8B, whole engine", "engine", 300, {"model": "llama-3-8b"}, _STEPS),
    "qwen": Section("Qwen3-0.6B, whole engine", "engine", 180, {"model": "qwen3-0.6b"}, _STEPS),
    "qwen-moe": Section("Qwen3-30B-A3B, whole engine", "engine", 240, {"model": "qwen3-30b-a3b"}, _STEPS),
    "start": Section("Start to first token", "start", 180),
    "host": Section("Host time and idle time", "host", 120),
    "host-qwen": Section("Host time and idle time, Qwen3-0.6B", "host", 120, {"model": "qwen3-0.6b"}),
    "static": Section("Static against continuous batching", "static", 240),
    "prefix": Section("A common prompt", "prefix", 120),
    "deterministic": Section("Deterministic mode", "modes", 240, {"mode": "deterministic"}),
    "cascade": Section("Cascade pass in the engine", "modes", 180, {"mode": "cascade"}),
    "prefill": Section("Prefill attention", "prefill", 180),
    "story": Section(
        "Generations of attention",
        "story",
        300,
        {},
        "16,384 tokens in sequences of a length. Bytes are what programs read and write outside of their own memory, counted.",
    ),
    "decode": Section("Decode attention", "decode", 120),
    "linear": Section("Products of few rows", "linear", 180),
    "moe": Section("Mixtures of experts", "moe", 180),
    "sampling": Section("Sampling", "sampling", 120, {"counts": (1, 64, 256)}),
    "loading": Section("Loading", "loading", 180),
}


def of_section(name: str) -> Iterator[Row]:
    """Its rows, made in this process."""
    section = SECTIONS[name]
    made: Iterator[Row] = importlib.import_module(f"benches.gpu.{section.module}").rows(**section.arguments)
    return made


def _machine() -> str:
    """What the figures are of; asked in another process so that this one holds no device."""
    code = (
        "import torch, triton; name = torch.cuda.get_device_name() if torch.cuda.is_available() else 'no GPU'; "
        "print(f'{name}, torch {torch.__version__}, Triton {triton.__version__}')"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def run_section(name: str, seconds: float) -> dict[str, Any]:
    """Runs it in a process of its own; its rows, and why it ended early if it did."""
    print(f"== {name}", flush=True)
    began, failure = time.monotonic(), ""
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as file:
        command = [sys.executable, "-m", "benches.gpu.run", "--child", name, "--out", file.name]
        # A group of its own, so that processes it has started end with it.
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        try:
            code = process.wait(seconds)
            failure = f"ended with {code}" if code else ""
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            failure = f"was stopped after {seconds:.0f} s"
        rows = [json.loads(said) for said in file if said.endswith("\n")]
    if failure:
        print(f"== {name} {failure}", flush=True)
    return {
        "command": f"python -m benches.gpu.run --only {name}",
        "when": datetime.now(UTC).strftime("%Y-%m-%d"),
        "seconds": round(time.monotonic() - began),
        "failure": failure,
        "rows": rows,
    }


def document(figures: dict[str, Any]) -> str:
    """The generated part, in Markdown."""
    lines = ['Bold: what was demanded is met. "Of the limit" is the share of what the machine could do at best.', ""]
    for name, section in SECTIONS.items():
        found = figures.get(name)
        if found is None:
            continue
        rows = [Row.of_json(row) for row in found["rows"]]
        lines += [f"#### {section.title}", ""]
        lines += [f"`{found['command']}`, {found['when']}, {found['machine']}. {section.text}".rstrip(), ""]
        if found["failure"]:
            lines += [f"This run was not complete: it {found['failure']}.", ""]
        if rows:
            lines += [table(rows), ""]
    return "\n".join(lines)


def rewrite(path: Path, text: str) -> None:
    """Puts the text between the markers.

    Raises:
        ValueError: the file does not have both markers once, in their order.
    """
    whole = path.read_text()
    before, begin, rest = whole.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in after or END in after:
        raise ValueError(f"{path} needs {BEGIN} and {END} once each, in this order")
    path.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}")


def summary(figures: dict[str, Any], names: list[str]) -> str:
    """How many demands were met, and those that were not."""
    rows = [Row.of_json(row) for name in names for row in figures[name]["rows"]]
    demands = [row for row in rows if row.demanded is not None]
    missed = [row for row in demands if not row.is_met]
    lines = [f"{len(demands) - len(missed)} of {len(demands)} demands met"]
    lines += [f"missed: {row.what}: {number(row.measured)} {row.unit}, not {number(row.demanded)}" for row in missed]
    lines += [f"not complete: {name} {figures[name]['failure']}" for name in names if figures[name]["failure"]]
    return "\n".join(lines)


def chosen(only: str) -> list[str]:
    """The sections named, in the order of the table.

    Raises:
        ValueError: a name that is none.
    """
    names = only.split(",") if only else list(SECTIONS)
    unknown = sorted(set(names) - set(SECTIONS))
    if unknown:
        raise ValueError(f"--only = {only}: no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    return [name for name in SECTIONS if name in names]


def run(names: list[str], out: Path, doc: Path | None, budget: float | None) -> int:
    """Runs the sections; the number of those that failed."""
    figures: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    machine, began, ran = _machine(), time.monotonic(), []
    for name in names:
        left = float("inf") if budget is None else budget - (time.monotonic() - began)
        if left < 20:
            print(f"== {name} and what follows: no time left", flush=True)
            break
        figures[name] = {"machine": machine, **run_section(name, min(SECTIONS[name].seconds, left))}
        ran.append(name)
        # After each section: what is measured is kept whatever happens to the next.
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(figures, indent=1) + "\n")
        if doc is not None:
            rewrite(doc, document(figures))
    print(summary(figures, ran))
    return sum(bool(figures[name]["failure"]) for name in ran)


def merge(files: list[Path], out: Path, doc: Path | None) -> None:
    """Adds the sections of other runs' figures, the later file's of each, and writes the document."""
    figures: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    for file in files:
        figures |= json.loads(file.read_text())
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(figures, indent=1) + "\n")
    if doc is not None:
        rewrite(doc, document(figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME,NAME", help="these sections")
    parser.add_argument("--list", action="store_true", help="name the sections and end")
    parser.add_argument("--out", type=Path, default=ROOT / "target" / "gpu-figures.json", help="figures, as JSON")
    parser.add_argument("--doc", type=Path, default=ROOT / "docs" / "performance.md", help="where the table goes")
    parser.add_argument("--no-doc", action="store_true", help="leave the document alone")
    parser.add_argument("--budget", type=float, help="seconds for all sections together")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="run nothing, take these figures")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.list:
        for name, section in SECTIONS.items():
            print(f"{name:14s} at most {section.seconds:3d} s  {section.title}")
        return
    if args.child:
        with args.out.open("w") as file:
            for _ in shown(of_section(args.child), file):
                pass
        return
    doc = None if args.no_doc else args.doc
    if args.merge:
        merge(args.merge, args.out, doc)
        return
    try:
        names = chosen(args.only)
    except ValueError as error:
        parser.error(str(error))
    sys.exit(min(1, run(names, args.out, doc, args.budget)))


if __name__ == "__main__":
    main()
