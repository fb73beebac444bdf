"""octavo's side: what the engine says of a text, through the public API, while it runs as it always does.

A *trace* is a sequence of tokens with the engine's log-probabilities at its positions: `T` scored positions, `K` likeliest
tokens at each.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np

from octavo._core import Tokenizer
from octavo.config import EngineConfig
from octavo.errors import EngineError
from octavo.llm import LLM
from octavo.outputs import PositionLogprobs
from octavo.sampling_params import SamplingParams

Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Ids: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

TOP: Final = 40
"""`K`: tokens whose probabilities are compared one by one; the others count as one."""
WINDOW: Final = 768
"""Tokens of one sequence: more than the window of the models with the smallest (512), and many chunks."""
_CHUNK: Final = 128
_ROWS: Final = 8
# Where greedy answers begin: inside the first blocks that the first sequence left in the prefix cache.
_CUTS: Final = (40, 75, 110)
_ANSWER: Final = 16


@dataclass(frozen=True, slots=True)
class Trace:
    """One sequence and what the engine said of it."""

    tokens: tuple[int, ...]
    first: int
    """Index of the first scored token; all after it are scored too."""
    own: Floats
    """`[T]` log-probabilities of the tokens themselves."""
    ids: Ids
    """`[T, K]` the likeliest tokens, falling."""
    logprobs: Floats
    """`[T, K]` of `ids`."""
    answered: bool
    """The engine wrote the scored tokens itself, after a cached prefix; else they are given text."""


def split_text(tokenizer: Tokenizer, text: str, count: int, window: int) -> list[list[int]]:
    """The first `count` tokens of a text as sequences of at most `window`, each with the model's beginning-of-sequence token."""
    body = tokenizer.encode(text, False, False)
    whole = tokenizer.encode(text, True, False)
    bos = tokenizer.bos_token_id
    head = [bos] if bos is not None and whole[:1] == [bos] and body[:1] != [bos] else []
    step = window - len(head)
    parts = [body[start : min(start + step, count)] for start in range(0, min(count, len(body)), step)]
    return [head + part for part in parts if len(head) + len(part) > 1]


def engine_config(config: EngineConfig, window: int, **changes: Any) -> EngineConfig:
    """The user's configuration with small steps, so that texts are computed in chunks and side by side."""
    given = {
        "max_model_len": config.max_model_len or window + _ANSWER,
        "max_num_batched_tokens": config.max_num_batched_tokens or _CHUNK,
        "max_num_seqs": min(config.max_num_seqs, _ROWS),
        "max_logprobs": TOP,
        "logprobs_mode": "raw",
        "disable_log_stats": True,
        "skip_tokenizer_init": True,
        "generation_config": "none",
        **changes,
    }
    names = EngineConfig.__dataclass_fields__
    return EngineConfig(**{name: given.get(name, getattr(config, name)) for name in names})


def run_engine(config: EngineConfig, windows: Sequence[list[int]], advance: Callable[[int], None]) -> list[Trace]:
    """Scores all windows at once, in chunks; then lets the engine answer greedily after beginnings of the first, which are cached.

    Args:
        config: of `engine_config`.
        windows: token ids, each of two or more.
        advance: called with the number of tokens scored.

    Raises:
        EngineError: a request failed.
    """
    given = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=TOP, ignore_eos=True, detokenize=False)
    answer = SamplingParams(temperature=0.0, max_tokens=_ANSWER, logprobs=TOP, ignore_eos=True, detokenize=False)
    starts = [windows[0][:cut] for cut in _CUTS if cut < len(windows[0])]
    with LLM.from_config(config) as llm:
        traces = [_given(output) for output in _run(llm, windows, given, advance)]
        traces += [_answered(output) for output in _run(llm, starts, answer, advance)]
    del llm
    gc.collect()
    return traces


def _run(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams, advance: Callable[[int], None]) -> list[Any]:
    submissions = [llm.engine.submission_of_ids(prompt, params) for prompt in prompts]
    with llm.engine.submit(submissions) as batch:
        outputs = batch.collect(lambda output: advance(len(output.prompt_token_ids)))
    for output in outputs:
        if output.error is not None:
            raise EngineError(f"request {output.request_id}: {output.error}")
    return outputs


def _given(output: Any) -> Trace:
    return _trace(output.prompt_token_ids, 1, output.prompt_logprobs[1:], answered=False)


def _answered(output: Any) -> Trace:
    choice = output.outputs[0]
    tokens = [*output.prompt_token_ids, *choice.token_ids]
    return _trace(tokens, len(output.prompt_token_ids), choice.logprobs, answered=True)


def _trace(tokens: Sequence[int], first: int, positions: Sequence[PositionLogprobs], *, answered: bool) -> Trace:
    own = [position[token].logprob for token, position in zip(tokens[first:], positions, strict=True)]
    # The chosen token comes first, wherever it ranks; sorting is stable and the others fall already.
    best = [sorted(position.items(), key=lambda entry: -entry[1].logprob)[:TOP] for position in positions]
    width = min(map(len, best))
    ids = np.array([[token for token, _ in row[:width]] for row in best], dtype=np.int64)
    logprobs = np.array([[entry.logprob for _, entry in row[:width]] for row in best], dtype=np.float64)
    return Trace(tuple(tokens), first, np.array(own, dtype=np.float64), ids, logprobs, answered)
