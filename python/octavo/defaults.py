"""Where a request's parameters come from when it says nothing: request, then the model's file, then built-in values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from octavo.errors import ParameterError
from octavo.sampling_params import SamplingParams

# Fields of a generation_config.json that are sampling defaults; others concern transformers alone.
_TAKEN: Final = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")


def load_generation_config(where: str, model_path: Path) -> dict[str, Any]:
    """The model's sampling defaults.

    Args:
        where: `auto` (the model's folder), `none` or `vllm` (no defaults but the built-in), or a folder with the file.
        model_path: the model's folder or file.

    Raises:
        ParameterError: the file named cannot be read.
    """
    if where in ("none", "vllm"):
        return {}
    folder = Path(where) if where != "auto" else model_path
    path = folder / "generation_config.json"
    if not path.is_file():
        if where != "auto":
            raise ParameterError(
                "generation_config", where, "'auto', 'none', or a folder with a generation_config.json"
            )
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ParameterError("generation_config", str(path), f"valid JSON ({error})") from error
    if not isinstance(found, dict):
        raise ParameterError("generation_config", str(path), "a JSON object")
    taken = {name: found[name] for name in _TAKEN if found.get(name) is not None}
    if found.get("do_sample") is False:
        taken["temperature"] = 0.0
    try:
        default_sampling_params(taken)
    except ParameterError as error:
        raise ParameterError(
            "generation_config", str(path), f"a file of possible values, or 'none' to ignore it ({error})"
        ) from error
    return taken


def default_sampling_params(generation_config: dict[str, Any]) -> SamplingParams:
    """Built-in values with the model's own over them."""
    values = dict(generation_config)
    max_new_tokens = values.pop("max_new_tokens", None)
    if max_new_tokens is not None:
        values["max_tokens"] = max_new_tokens
    return SamplingParams(**values)
