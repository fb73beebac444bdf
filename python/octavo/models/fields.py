"""Readers of a configuration's fields. Every error names the field, and shows no more of its value than fits a line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.errors import ModelError

Config = Mapping[str, Any]
# Bounds of what a configuration may say: a damaged file must not make tables of any size before its tensors are looked at.
MAX_VOCAB: Final = 1 << 24
MAX_POSITIONS: Final = 1 << 24
MAX_WIDTH: Final = 1 << 20
MAX_LAYERS: Final = 1 << 12
MAX_HEADS: Final = 1 << 12
MAX_HEAD_DIM: Final = 1 << 12
MAX_EXPERTS: Final = 1 << 12


def integer(config: Config, key: str, high: int, default: int | None = None) -> int:
    """`config[key]` as an integer from 1 to `high`; with a default the field may be missing or null."""
    value = _value(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
        raise ModelError(f"{key}={shown(value)} must be an integer from 1 to {high}")
    return value


def number(config: Config, key: str, default: float | None = None) -> float:
    """`config[key]` as a finite number above 0; with a default the field may be missing or null."""
    value = _value(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise ModelError(f"{key}={shown(value)} must be a finite number above 0")
    return float(value)


def optional_number(config: Config, key: str) -> float | None:
    """`config[key]` as a finite number above 0, or None if it is missing or null."""
    return None if config.get(key) is None else number(config, key)


def numbers(config: Config, key: str) -> list[float]:
    """`config[key]` as a list of finite numbers above 0."""
    value = _value(config, key, None)
    if not isinstance(value, list):
        raise ModelError(f"{key}={shown(value)} must be a list of numbers")
    return [number({key: entry}, key) for entry in value]


def mapping(config: Config, key: str) -> Config:
    """`config[key]` as an object, an empty one if it is missing or null."""
    value = {} if config.get(key) is None else config[key]
    if not isinstance(value, Mapping):
        raise ModelError(f"{key}={shown(value)} must be an object")
    return value


def expect(config: Config, key: str, *allowed: Any) -> Any:
    """`config.get(key)` if it is one of `allowed` (the first one being the default), else a `ValueError`."""
    value = config.get(key, allowed[0])
    if value not in allowed:
        raise ModelError(f"{key}={shown(value)} is not supported; supported: {', '.join(map(repr, allowed))}")
    return value


def token_ids(value: Any) -> tuple[int, ...]:
    """None, one id or a list of ids as a tuple."""
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, list | tuple) else (value,)
    for one in ids:
        if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < MAX_VOCAB:
            raise ModelError(f"token id {shown(one)} must be an integer from 0 to {MAX_VOCAB - 1}")
    return ids


def _value(config: Config, key: str, default: Any) -> Any:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise ModelError(f"the model's configuration lacks {key!r}")
    return value


def shown(value: Any) -> str:
    """The beginning of `repr(value)`."""
    return repr(value)[:80]
