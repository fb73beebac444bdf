"""Rotary frequencies of every scaling scheme, in plain Python: a scheme chooses the frequencies and a magnitude.

Sources: linear (Chen et al., 2023), llama3 (Meta's reference code), YaRN (Peng et al., 2023, equations 17-24), LongRoPE (Ding
et al., 2024; magnitude as in Microsoft's Phi-3 code).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from octavo.errors import ModelError
from octavo.models.fields import MAX_POSITIONS, Config, integer, number, numbers, optional_number, shown
from octavo.models.spec import RopeSpec


def rope_kind(parameters: Config) -> Any:
    """`rope_type`, or `type` as older files call it; "default" if neither says anything."""
    given = (parameters.get(name) for name in ("rope_type", "type"))
    return next((kind for kind in given if kind is not None), "default")


def rope_from_config(
    parameters: Config, head_dim: int, max_positions: int, theta: float, interleaved: bool = False
) -> RopeSpec:
    """The frequencies of a `rope_parameters` or `rope_scaling` object of a `config.json`.

    Args:
        parameters: the object, maybe empty.
        head_dim: elements of a head; `partial_rotary_factor` of them are rotated.
        max_positions: the model's, the original one where a scheme needs it and the object has none.
        theta: used where the object has no `rope_theta`.
        interleaved: see `RopeSpec`.

    Raises:
        ModelError: an unknown `rope_type`, or a missing or impossible parameter of a known one.
    """
    kind = rope_kind(parameters)
    if not isinstance(kind, str) or kind not in _SCHEMES:
        raise ModelError(f"rope_type {shown(kind)} is not supported; supported: {', '.join(_SCHEMES)}")
    rotary_dim = int(head_dim * number(parameters, "partial_rotary_factor", 1.0))
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise ModelError(
            f"partial_rotary_factor={shown(parameters.get('partial_rotary_factor'))} rotates {rotary_dim} of {head_dim} elements; "
            f"it must be an even number from 2 to {head_dim}"
        )
    base = number(parameters, "rope_theta", theta)
    plain = [base ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2)]
    try:
        return _SCHEMES[kind](plain, base, max_positions, parameters, interleaved)
    except (ModelError, ArithmeticError) as error:
        raise ModelError(f"rope_type {kind!r}: {error}") from error


def _default(plain: list[float], _base: float, _max: int, _parameters: Config, interleaved: bool) -> RopeSpec:
    return RopeSpec(tuple(plain), 1.0, interleaved)


def _linear(plain: list[float], _base: float, _max: int, parameters: Config, interleaved: bool) -> RopeSpec:
    """Positions are divided by `factor`."""
    factor = number(parameters, "factor")
    return RopeSpec(tuple(f / factor for f in plain), 1.0, interleaved)


def _factors(plain: list[float], _base: float, _max: int, parameters: Config, interleaved: bool) -> RopeSpec:
    """Each frequency is divided by its own of `factors`: how GGUF files store llama3 scaling."""
    return RopeSpec(tuple(_divided(plain, parameters, "factors")), 1.0, interleaved)


def _llama3(plain: list[float], _base: float, _max: int, parameters: Config, interleaved: bool) -> RopeSpec:
    """Long wavelengths are divided by `factor`, short ones kept, those between interpolated."""
    factor, low, high = (number(parameters, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original = number(parameters, "original_max_position_embeddings")
    if high <= low:
        raise ModelError(f"high_freq_factor={high} must be above low_freq_factor={low}")

    def scaled(freq: float) -> float:
        turns = original * freq / (2 * math.pi)
        keep = min(1.0, max(0.0, (turns - low) / (high - low)))
        return keep * freq + (1 - keep) * freq / factor

    return RopeSpec(tuple(scaled(freq) for freq in plain), 1.0, interleaved)


def _yarn(plain: list[float], base: float, max_positions: int, parameters: Config, interleaved: bool) -> RopeSpec:
    """Interpolates by dimension between `beta_fast` and `beta_slow` turns; scales attention by `0.1 ln(factor) + 1`."""
    factor = number(parameters, "factor")
    original = number(parameters, "original_max_position_embeddings", max_positions)
    rotary_dim = 2 * len(plain)

    def dimension(turns: float) -> float:
        return rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(number(parameters, "beta_fast", 32.0)), dimension(number(parameters, "beta_slow", 1.0))
    if parameters.get("truncate", True):
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, rotary_dim - 1.0)
    span = high - low if high > low else 0.001

    def scaled(index: int, freq: float) -> float:
        interpolate = min(1.0, max(0.0, (index - low) / span))
        return interpolate * freq / factor + (1 - interpolate) * freq

    def magnitude(scale: float, weight: float) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    given = optional_number(parameters, "attention_factor")
    if given is None:
        whole, split = optional_number(parameters, "mscale"), optional_number(parameters, "mscale_all_dim")
        given = magnitude(factor, whole) / magnitude(factor, split) if whole and split else magnitude(factor, 1.0)
    return RopeSpec(tuple(scaled(i, freq) for i, freq in enumerate(plain)), given, interleaved)


def _longrope(plain: list[float], _base: float, max_positions: int, parameters: Config, interleaved: bool) -> RopeSpec:
    """Frequencies divided by `short_factor`, or by `long_factor` for sequences beyond the original length; one magnitude."""
    original = integer(parameters, "original_max_position_embeddings", MAX_POSITIONS)
    factor = number(parameters, "factor", max_positions / original)
    given = optional_number(parameters, "attention_factor")
    if given is None:
        given = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeSpec(
        tuple(_divided(plain, parameters, "short_factor")),
        given,
        interleaved,
        long_inv_freq=tuple(_divided(plain, parameters, "long_factor")),
        long_above=original,
    )


def _divided(plain: list[float], parameters: Config, name: str) -> list[float]:
    factors = numbers(parameters, name)
    if len(factors) != len(plain):
        raise ModelError(f"{name} has {len(factors)} entries, the rotation has {len(plain)} frequencies")
    return [frequency / factor for frequency, factor in zip(plain, factors, strict=True)]


_SCHEMES: dict[str, Callable[[list[float], float, int, Config, bool], RopeSpec]] = {
    "default": _default,
    # NTK scaling that begins beyond the model's length, where no sequence goes.
    "dynamic": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
    "factors": _factors,
}
