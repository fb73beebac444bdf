"""How far the engine is from the truth, and how far it may be. Knows arrays, not models.

The divergence is Kullback and Leibler's (1951) from the truth to the engine, over the engine's `K` likeliest tokens and all others
as one. Joining outcomes never raises it, so it is a lower bound; with `K` = 40 the joined rest is small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from octavo.quality.traces import Floats, Trace

EXACT_LOGPROB: Final = 1e-3
"""Largest difference of any log-probability on the fp32 path, in nats."""
MEAN_DIVERGENCE: Final = 0.02
"""Mean divergence of a path that rounds, in nats."""
SAME_BEST: Final = 0.90
"""Share of positions at which a path that rounds finds the same likeliest token."""
PERPLEXITY: Final = 0.01
"""Relative difference of the perplexity, of any path."""
_LEAST: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Distance:
    """Of one engine from the truth, over all positions of its traces."""

    positions: int
    max_logprob_difference: float
    """Over every token of the text and every one of the `K` likeliest, in nats."""
    mean_divergence: float
    max_divergence: float
    same_best: float
    """Share of positions with the same likeliest token."""
    perplexity: float
    """Of the given text; answers of the engine itself do not count."""
    true_perplexity: float

    @property
    def perplexity_difference(self) -> float:
        """Relative to the truth."""
        return self.perplexity / self.true_perplexity - 1.0


def distance(traces: Sequence[Trace], truths: Sequence[Any]) -> Distance:
    """Compares traces with what the oracle says of each (`oracle.Truth`); one or more, one of them of a given text."""
    own, true_own = _joined(t.own for t in traces), _joined(t.own for t in truths)
    width = min(trace.ids.shape[1] for trace in traces)
    logprobs = np.concatenate([trace.logprobs[:, :width] for trace in traces])
    true_logprobs = np.concatenate([truth.logprobs[:, :width] for truth in truths])
    divergence = _divergence(true_logprobs, logprobs)
    best, true_best = _joined(t.ids[:, 0] for t in traces), _joined(t.best for t in truths)
    given = _joined(np.full(len(trace.own), not trace.answered) for trace in traces)
    return Distance(
        positions=len(own),
        max_logprob_difference=float(max(np.abs(own - true_own).max(), np.abs(logprobs - true_logprobs).max())),
        mean_divergence=float(divergence.mean()),
        max_divergence=float(divergence.max()),
        same_best=float((best == true_best).mean()),
        perplexity=float(np.exp(-own[given].mean())),
        true_perplexity=float(np.exp(-true_own[given].mean())),
    )


def _divergence(truth: Floats, engine: Floats) -> Floats:
    """Per row of log-probabilities `[T, K]`, in nats."""
    p, q = np.exp(truth), np.exp(engine)
    rest_p, rest_q = np.clip(1.0 - p.sum(-1), _LEAST, 1.0), np.clip(1.0 - q.sum(-1), _LEAST, 1.0)
    found: Floats = (p * (truth - engine)).sum(-1) + rest_p * np.log(rest_p / rest_q)
    return found


def _joined(parts: Any) -> Any:
    return np.concatenate(list(parts))
