"""Embeddings: how a model's hidden states become a vector, and what is made of the vector."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, get_args

from octavo.errors import ParameterError

Pooling = Literal["last", "mean"]

# Keys of sentence-transformers' pooling modules.
_MODES: Final[dict[str, Pooling]] = {"pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"}


def check_pooling(pooling: object) -> Pooling | None:
    """`pooling` if it is a kind, or None.

    Raises:
        ParameterError: it is neither.
    """
    if pooling is not None and pooling not in get_args(Pooling):
        raise ParameterError("pooling", pooling, "one of " + ", ".join(get_args(Pooling)))
    return pooling  # type: ignore[return-value]


def model_pooling(model: Path) -> Pooling:
    """The kind that the model's `1_Pooling/config.json` names; the last token's state without one, as generative models are read.

    Raises:
        ParameterError: the model wants a kind that there is not.
    """
    try:
        config = json.loads((model / "1_Pooling" / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "last"
    if not isinstance(config, dict):
        return "last"
    wanted = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if len(wanted) == 1 and wanted[0] in _MODES:
        return _MODES[wanted[0]]
    raise ParameterError(
        "pooling", ", ".join(wanted) or None, "one of " + ", ".join(_MODES) + " in 1_Pooling/config.json"
    )


def finish(vector: Sequence[float], dimensions: int | None, normalize: bool) -> list[float]:
    """The first `dimensions` numbers (Matryoshka), then scaled to length 1.

    Raises:
        ParameterError: the vector is shorter.
    """
    if dimensions is not None and not 1 <= dimensions <= len(vector):
        raise ParameterError("dimensions", dimensions, f"from 1 to {len(vector)}")
    kept = list(vector[:dimensions])
    norm = math.sqrt(math.fsum(x * x for x in kept))
    return [x / norm for x in kept] if normalize and norm > 0 else kept
