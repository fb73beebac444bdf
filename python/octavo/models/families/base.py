"""What a family's file provides, and small readers of `config.json` that name the field in their errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from octavo.errors import ModelError
from octavo.models.spec import ModelSpec
from octavo.ops.base import StoredTensor

Config = Mapping[str, Any]
# Bounds of what a configuration may say: a damaged file must not make tables of any size before its tensors are looked at.
MAX_VOCAB: Final = 1 << 24
MAX_POSITIONS: Final = 1 << 24
MAX_WIDTH: Final = 1 << 20
MAX_LAYERS: Final = 1 << 12
MAX_HEADS: Final = 1 << 12
MAX_HEAD_DIM: Final = 1 << 12
Adapt = Callable[[ModelSpec], Callable[[str, StoredTensor], StoredTensor]]


@dataclass(frozen=True, slots=True)
class Family:
    """How an architecture's checkpoints become a `ModelSpec` and the decoder's tensor names.

    The name maps go from the decoder's names to the file's, `{}` being the layer number.
    """

    name: str
    from_config: Callable[[Config], ModelSpec]
    config_names: Mapping[str, str]
    from_gguf: Callable[[Config], ModelSpec] | None = None
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    gguf_adapt: Adapt | None = None
    """Undoes row orders of the GGUF file."""


def need(config: Config, key: str) -> Any:
    """`config[key]`, or a `ValueError` that names the missing field."""
    value = config.get(key)
    if value is None:
        raise ModelError(f"the model's configuration lacks {key!r}")
    return value


def integer(config: Config, key: str, high: int, default: Any = None) -> int:
    """`config[key]` as an integer from 1 to `high`; with a default (not `None`) the field may be missing or null."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        return int(need(config, key))
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
        raise ModelError(f"{key}={_shown(value)} must be an integer from 1 to {high}")
    return value


def number(config: Config, key: str, default: float | None = None) -> float:
    """`config[key]` as a finite number above 0; with a default the field may be missing or null."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        return float(need(config, key))
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise ModelError(f"{key}={_shown(value)} must be a finite number above 0")
    return float(value)


def _shown(value: Any) -> str:
    return repr(value)[:80]


def expect(config: Config, key: str, *allowed: Any) -> Any:
    """`config.get(key)` if it is one of `allowed` (the first one being the default), else a `ValueError`."""
    value = config.get(key, allowed[0])
    if value not in allowed:
        raise ModelError(f"{key}={value!r} is not supported; supported: {', '.join(map(repr, allowed))}")
    return value


def token_ids(value: Any) -> tuple[int, ...]:
    """None, one id or a list of ids as a tuple."""
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, list | tuple) else (value,)
    for one in ids:
        if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < MAX_VOCAB:
            raise ModelError(f"token id {_shown(one)} must be an integer from 0 to {MAX_VOCAB - 1}")
    return ids
