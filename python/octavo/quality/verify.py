"""`verify`: one model, octavo's exact path and the path as it runs, against transformers. One model in memory at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Final

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from octavo._core import Tokenizer
from octavo.config import EngineConfig
from octavo.errors import ParameterError
from octavo.memory import free_bytes
from octavo.models.catalog import resolve_model
from octavo.models.describe import describe_model
from octavo.models.loader import open_model
from octavo.quality.measures import (
    EXACT_LOGPROB,
    MEAN_DIVERGENCE,
    PERPLEXITY,
    SAME_BEST,
    Distance,
    distance,
)
from octavo.quality.oracle import ModelOracle, NoOracle, TokenizerOracle, check_loadable, transformers_version
from octavo.quality.report import Check, Report, at_least, at_most, not_verified
from octavo.quality.texts import TOKENIZER_TEXTS, sample_text
from octavo.quality.traces import WINDOW, engine_config, run_engine, split_text
from octavo.text import load_tokenizer
from octavo.units import format_bytes

_EXACT: Final = "exact path"
_BASE_BYTES: Final = 1 << 30
"""What Python, torch and transformers take themselves."""


class Stages:
    """One bar for each stage of a verification, on standard error; none where that is no terminal."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        # The stream as it is now: the loading stages silence standard error.
        self._progress = Progress(*columns, console=Console(file=sys.stderr), disable=not sys.stderr.isatty())

    def __enter__(self) -> Stages:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    def add(self, name: str, total: int) -> Callable[[int], None]:
        """Begins a stage of `total` units of work; the result is called with the units done."""
        task = self._progress.add_task(name, total=total)
        return lambda done: self._progress.advance(task, done)


def verify(config: EngineConfig, num_tokens: int, text: str | None = None) -> Report:
    """Compares a model's tokenizer, log-probabilities and perplexity with transformers'.

    Args:
        config: the engine as the user runs it.
        num_tokens: tokens of text to score, at least 2; fewer if the text is shorter.
        text: what to score; the built-in sample by default.

    Raises:
        ParameterError: the configuration or text cannot be used.
        NoOracle: transformers is not installed.
        ModelError: octavo cannot find or run the model.
    """
    source = resolve_model(config.model)
    is_gguf = source.path.suffix == ".gguf"
    version = transformers_version(gguf=is_gguf)
    tokenizer_path = Path(config.tokenizer or source.path)
    tokenizer = load_tokenizer(tokenizer_path)
    opened = open_model(source)
    longest = min(WINDOW, (config.max_model_len or opened.spec.max_positions) - 1)
    windows = split_text(tokenizer, sample_text() if text is None else text, num_tokens, longest)
    if not windows:
        raise ParameterError("text", text, "long enough for two tokens")
    with Stages() as stages:
        checks, notes = _tokenizer_checks(tokenizer, tokenizer_path, stages)
        description = describe_model(opened, [])
        needed = _fp32_bytes(description.parameters, opened.spec.vocab_size, longest, is_gguf)
        logit_checks, oracle_name = _logit_checks(config, source.path, windows, longest, needed, stages)
    return Report(
        model=source.name,
        path=str(source.path),
        oracle=f"transformers {version}{oracle_name}",
        tokens=sum(len(window) - 1 for window in windows),
        checks=(*checks, *logit_checks),
        notes=tuple(notes),
    )


# -- tokenizer -----------------------------------------------------------------------------------------------------


def _tokenizer_checks(tokenizer: Tokenizer, path: Path, stages: Stages) -> tuple[list[Check], list[str]]:
    """Ids of every text; the first text whose ids differ becomes a note."""
    advance = stages.add("tokenizer", 1)
    what, allowed = "texts with other ids", "none"
    try:
        oracle = TokenizerOracle(path)
    except NoOracle as reason:
        return [not_verified("tokenizer", what, 0, allowed, f"no oracle: {reason}")], []
    texts = [*TOKENIZER_TEXTS, sample_text(), oracle.special_text()]
    wrong = []
    for text in texts:
        ids, expected = tokenizer.encode(text, oracle.adds_special, True), oracle.encode(text)
        if ids != expected:
            wrong.append(first_difference(tokenizer, text, ids, expected))
    advance(1)
    check = replace(
        at_most("tokenizer", what, len(wrong), 0, ".0f"),
        measured=f"{len(wrong)} of {len(texts)} ({oracle.name})",
        allowed=allowed,
    )
    return [check], wrong[:1]


def first_difference(tokenizer: Tokenizer, text: str, ids: Sequence[int], expected: Sequence[int]) -> str:
    """Where two lists of ids part, with the tokens of both from there, and the text before."""
    at = next((i for i, (a, b) in enumerate(zip(ids, expected, strict=False)) if a != b), min(len(ids), len(expected)))

    def shown(tokens: Sequence[int]) -> str:
        named = [f"{token} {_token(tokenizer, token)}" for token in tokens[at : at + 4]]
        return ", ".join(named) + (", …" if len(tokens) > at + 4 else "") or "nothing more"

    before = tokenizer.decode(list(ids[:at]), False)[-40:]
    return (
        f"first different ids: in {text[:60]!r}, token {at}, after {before!r}:\n"
        f"  octavo        {shown(ids)}\n  transformers  {shown(expected)}"
    )


def _token(tokenizer: Tokenizer, token: int) -> str:
    return repr(tokenizer.token_str(token)) if 0 <= token < tokenizer.vocab_size else "(not in octavo's vocabulary)"


# -- logits --------------------------------------------------------------------------------------------------------


def _logit_checks(
    config: EngineConfig, path: Path, windows: list[list[int]], longest: int, needed: int, stages: Stages
) -> tuple[list[Check], str]:
    """Checks of both paths, and the name of the oracle's model. The engines run first, then transformers."""
    exact = engine_config(config, longest, backend="reference", dtype="float32")
    running = engine_config(config, longest)
    paths = {_EXACT: exact}
    if (running.backend, running.dtype) != (exact.backend, exact.dtype):
        paths[_path_name(running)] = running
    free = free_bytes(torch.device("cpu"))
    if needed > free:
        reason = f"no memory: fp32 needs about {format_bytes(needed)}, {format_bytes(free)} are free"
        return _unverified(paths, reason), ""
    try:
        check_loadable(path)
        total = sum(map(len, windows))
        traces = {name: run_engine(settings, windows, stages.add(name, total)) for name, settings in paths.items()}
        oracle = ModelOracle(path, config.threads)
    except NoOracle as reason:
        return _unverified(paths, f"no oracle: {reason}"), ""
    every = [trace for found in traces.values() for trace in found]
    truths = oracle.truths(every, stages.add("transformers", sum(map(len, {trace.tokens for trace in every}))))
    oracle.release()
    checks = []
    for name, found in traces.items():
        checks += _judge(name, distance(found, truths[: len(found)]))
        truths = truths[len(found) :]
    return checks, f" ({oracle.name})"


def _judge(name: str, found: Distance) -> list[Check]:
    perplexity = at_most(name, "perplexity", abs(found.perplexity_difference), PERPLEXITY, ".2%")
    perplexity = replace(
        perplexity,
        value=found.perplexity_difference,
        measured=f"{found.perplexity:.3f} against {found.true_perplexity:.3f}, {found.perplexity_difference:+.2%}",
        allowed=f"± {PERPLEXITY:.0%}",
    )
    if name == _EXACT:
        return [
            at_most(name, "largest |Δ log-probability|", found.max_logprob_difference, EXACT_LOGPROB, ".1e"),
            perplexity,
        ]
    return [
        at_most(name, "mean divergence, nats", found.mean_divergence, MEAN_DIVERGENCE, ".4f"),
        at_least(name, "same likeliest token", found.same_best, SAME_BEST, ".1%"),
        perplexity,
    ]


def _unverified(paths: dict[str, EngineConfig], reason: str) -> list[Check]:
    return [
        not_verified(name, "log-probabilities, perplexity", PERPLEXITY, f"± {PERPLEXITY:.0%}", reason) for name in paths
    ]


def _path_name(config: EngineConfig) -> str:
    backend = config.backend
    if backend == "auto":
        backend = "cuda" if torch.cuda.is_available() else "cpu"
    return f"as it runs ({backend}{'' if config.dtype == 'auto' else f', {config.dtype}'})"


def _fp32_bytes(parameters: int, vocab_size: int, longest: int, is_gguf: bool) -> int:
    """Most that transformers takes: the weights (twice while it unpacks a GGUF file), and the logits of a sequence twice."""
    return _BASE_BYTES + 4 * parameters * (2 if is_gguf else 1) + 2 * 4 * vocab_size * longest
