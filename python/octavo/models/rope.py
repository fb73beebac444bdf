"""Rotary frequencies of every scaling scheme, in plain Python: a scheme chooses the frequencies and a magnitude.

Sources: linear (Chen et al., 2023), llama3 (Meta's reference code), YaRN (Peng et al., 2023, equations 17-24).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from octavo.errors import ModelError
from octavo.models.spec import RopeSpec

Parameters = Mapping[str, Any]


def rope_from_config(
    parameters: Parameters, head_dim: int, max_positions: int, theta: float, interleaved: bool = False
) -> RopeSpec:
    """The frequencies of a `rope_parameters` or `rope_scaling` object of a `config.json`.

    Args:
        parameters: the object, maybe empty.
        head_dim: elements of a head; `partial_rotary_factor` of them are rotated.
        max_positions: the model's, the original one where a scheme needs it and the object has none.
        theta: used where the object has no `rope_theta`.
        interleaved: see `RopeSpec`.

    Raises:
        ModelError: an unknown `rope_type`, or a missing parameter of a known one.
    """
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in _SCHEMES:
        raise ModelError(f"rope_type {kind!r} is not supported; supported: {', '.join(_SCHEMES)}")
    rotary_dim = int(head_dim * float(parameters.get("partial_rotary_factor", 1.0)))
    base = float(parameters.get("rope_theta", theta))
    plain = [base ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2)]
    try:
        inv_freq, magnitude = _SCHEMES[kind](plain, base, max_positions, parameters)
    except KeyError as error:
        raise ModelError(f"rope_type {kind!r} needs {error.args[0]!r}") from error
    return RopeSpec(tuple(inv_freq), magnitude, interleaved)


def _default(plain: list[float], _base: float, _max: int, _parameters: Parameters) -> tuple[list[float], float]:
    return plain, 1.0


def _linear(plain: list[float], _base: float, _max: int, parameters: Parameters) -> tuple[list[float], float]:
    """Positions are divided by `factor`."""
    return [f / float(parameters["factor"]) for f in plain], 1.0


def _llama3(plain: list[float], _base: float, _max: int, parameters: Parameters) -> tuple[list[float], float]:
    """Long wavelengths are divided by `factor`, short ones kept, those between interpolated."""
    factor, low = float(parameters["factor"]), float(parameters["low_freq_factor"])
    high, original = float(parameters["high_freq_factor"]), float(parameters["original_max_position_embeddings"])

    def scaled(freq: float) -> float:
        turns = original * freq / (2 * math.pi)
        keep = min(1.0, max(0.0, (turns - low) / (high - low)))
        return keep * freq + (1 - keep) * freq / factor

    return [scaled(freq) for freq in plain], 1.0


def _yarn(plain: list[float], base: float, max_positions: int, parameters: Parameters) -> tuple[list[float], float]:
    """Interpolates by dimension between `beta_fast` and `beta_slow` turns; scales attention by `0.1 ln(factor) + 1`."""
    factor = float(parameters["factor"])
    original = float(parameters.get("original_max_position_embeddings") or max_positions)
    rotary_dim = 2 * len(plain)

    def dimension(turns: float) -> float:
        return rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(float(parameters.get("beta_fast") or 32)), dimension(float(parameters.get("beta_slow") or 1))
    if parameters.get("truncate", True):
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, rotary_dim - 1.0)
    span = high - low if high > low else 0.001

    def scaled(index: int, freq: float) -> float:
        interpolate = min(1.0, max(0.0, (index - low) / span))
        return interpolate * freq / factor + (1 - interpolate) * freq

    def magnitude(scale: float, weight: float) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    given = parameters.get("attention_factor")
    if given is None:
        whole, split = parameters.get("mscale"), parameters.get("mscale_all_dim")
        given = magnitude(factor, whole) / magnitude(factor, split) if whole and split else magnitude(factor, 1.0)
    return [scaled(i, freq) for i, freq in enumerate(plain)], float(given)


_SCHEMES = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
