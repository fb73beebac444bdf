"""What a request gets that says nothing: flags of the engine, then the model's file, then built-in values.

A model's file is `generation_config.json` of its folder, or the metadata `general.sampling.*` of a GGUF file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from octavo._core import Gguf
from octavo.errors import ParameterError
from octavo.sampling_params import SamplingParams

OVERRIDE: Final = "override_generation_config"
_FILE: Final = "generation_config.json"
# Fields of a generation_config.json that are sampling defaults; others concern transformers alone.
_TAKEN: Final = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "max_new_tokens",
)
# As llama.cpp's converter writes them and its server reads them.
_GGUF_TAKEN: Final = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Defaults by the name in a generation configuration, and where each comes from; what is absent is built in."""

    values: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    def describe(self) -> str:
        """`temperature=0.7, top_p=0.9 (generation_config.json); others built in`."""
        by_source: dict[str, list[str]] = {}
        for name, value in self.values.items():
            by_source.setdefault(self.sources[name], []).append(f"{name}={value}")
        found = [f"{', '.join(fields)} ({source})" for source, fields in by_source.items()]
        return "; ".join([*found, "others built in" if found else "built in"])


def load_sampling_defaults(where: str, override: Mapping[str, Any] | None, model_path: Path | None) -> SamplingDefaults:
    """The engine's defaults for requests.

    Args:
        where: `auto` (the model's file), `none` or `vllm` (no file), or a folder with a `generation_config.json`.
        override: fields that win over those of the file.
        model_path: the model's folder or `.gguf` file.

    Raises:
        ParameterError: a file cannot be read or has an impossible value; names the file and the field.
    """
    values, source = _from_file(where, model_path)
    sources = dict.fromkeys(values, source)
    if override:
        for name, value in override.items():
            if name not in _TAKEN:
                raise ParameterError(OVERRIDE, name, f"made of the fields {', '.join(_TAKEN)}")
            values[name] = value
            sources[name] = OVERRIDE
        _check(override, OVERRIDE, dict(override), "made of possible values")
    return SamplingDefaults(values, sources)


def default_sampling_params(defaults: SamplingDefaults) -> SamplingParams:
    """Built-in values with the defaults over them."""
    return _params(defaults.values)


def _params(values: Mapping[str, Any]) -> SamplingParams:
    renamed = {"max_tokens" if name == "max_new_tokens" else name: value for name, value in values.items()}
    return SamplingParams(**renamed)


def _from_file(where: str, model_path: Path | None) -> tuple[dict[str, Any], str]:
    """Sampling defaults of a file, and its name for the log."""
    if where in ("none", "vllm"):
        return {}, ""
    if where != "auto":
        path = Path(where) / _FILE
        if not path.is_file():
            raise ParameterError("generation_config", where, f"'auto', 'none', or a folder with a {_FILE}")
        return _from_json(path), str(path)
    if model_path is None:
        return {}, ""
    if model_path.suffix == ".gguf":
        return _from_gguf(model_path), model_path.name
    path = model_path / _FILE
    return (_from_json(path), _FILE) if path.is_file() else ({}, "")


def _from_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ParameterError("generation_config", str(path), f"valid JSON ({error})") from error
    if not isinstance(found, dict):
        raise ParameterError("generation_config", str(path), "a JSON object")
    taken = {name: found[name] for name in _TAKEN if found.get(name) is not None}
    if found.get("do_sample") is False:
        taken["temperature"] = 0.0
    _check(taken, "generation_config", str(path), "a file of possible values, or 'none' to ignore it")
    return taken


def _from_gguf(path: Path) -> dict[str, Any]:
    metadata = Gguf(path).metadata()
    taken = {ours: _short(metadata[key]) for key, ours in _GGUF_TAKEN.items() if metadata.get(key) is not None}
    _check(taken, "generation_config", str(path), "a file of possible values, or 'none' to ignore it")
    return taken


def _short(value: Any) -> Any:
    """A float32 as its writer meant it: 0.95 instead of 0.949999988079071."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _check(values: Mapping[str, Any], param: str, shown: Any, allowed: str) -> None:
    try:
        _params(values)
    except ParameterError as error:
        raise ParameterError(param, shown, f"{allowed} ({error})") from error
