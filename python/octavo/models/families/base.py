"""What a family's file provides, and small readers of `config.json` that name the field in their errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.errors import ModelError
from octavo.models.spec import ModelSpec
from octavo.ops.base import StoredTensor

Config = Mapping[str, Any]
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
    return tuple(value) if isinstance(value, list | tuple) else (int(value),)
