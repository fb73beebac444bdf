"""From the names of a repository's files to those that make one model. Repositories often hold the same weights many times."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from octavo.models.source import ModelNotFoundError

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
_CONFIG: Final = "config.json"
_ADAPTER: Final = "adapter_config.json"
# What describes a model and its text; other JSON files may be of any size and are not read.
_DESCRIPTIONS: Final = (
    _CONFIG,
    "generation_config.json",
    "quantize_config.json",
    "quant_config.json",
    "hf_quant_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_SPLIT: Final = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
# A vision encoder that goes with a model, not a model.
_PROJECTOR: Final = "mmproj"


@dataclass(frozen=True, slots=True)
class Choice:
    """The files of one model."""

    files: tuple[str, ...]
    """All of them, as the repository names them."""
    entry: str | None
    """The GGUF file to open (of a split one the first part); None: the folder of a safetensors model."""


def choose_files(
    model: str, names: Collection[str], read: Callable[[str], bytes], wanted: str | None = None, separator: str = ":"
) -> Choice:
    """Pick one model's files.

    Args:
        model: what the user wrote, for the errors.
        names: every file, with `/` between folders.
        read: the content of a file of `names`; asked for the index of a sharded model only.
        wanted: the GGUF file that the user named.
        separator: what stands between a repository and a file where a model is named.

    Raises:
        ModelNotFoundError: there is no such file, none that can be run, or more than one to choose from.
    """
    if wanted is not None:
        return _gguf(model, names, wanted, separator)
    if INDEX in names:
        return _folder(model, names, _shards(model, names, read(INDEX)))
    weights = [SINGLE] if SINGLE in names else sorted(n for n in names if n.endswith(".safetensors") and "/" not in n)
    if weights and _ADAPTER in names and _CONFIG not in names:
        raise ModelNotFoundError(f"model={model!r}: it holds an adapter ({_ADAPTER}), not a model")
    if len(weights) == 1:
        return _folder(model, names, weights)
    if weights:
        raise ModelNotFoundError(
            f"model={model!r}: {len(weights)} safetensors files ({_few(weights)}) and no {INDEX} that says which are the model"
        )
    if options := _gguf_options(names):
        if len(options) > 1:
            ids = _as_ids(model, options, separator)
            raise ModelNotFoundError(f"model={model!r}: choose one of its GGUF files: {ids}")
        return _gguf(model, names, options[0], separator)
    if pickles := sorted(n for n in names if n.endswith(_PICKLES)):
        raise ModelNotFoundError(
            f"model={model!r}: its weights are pickles ({_few(pickles)}), which can run code and are never loaded; "
            f"convert them to safetensors"
        )
    raise ModelNotFoundError(f"model={model!r}: it holds no safetensors or GGUF file, so no weights")


def _folder(model: str, names: Collection[str], weights: list[str]) -> Choice:
    if _CONFIG not in names:
        raise ModelNotFoundError(f"model={model!r}: it has weights but no {_CONFIG} that describes them")
    found = [name for name in names if any(fnmatchcase(name, pattern) for pattern in _DESCRIPTIONS)]
    if INDEX in names:
        found.append(INDEX)
    return Choice((*sorted(found), *weights), None)


def _shards(model: str, names: Collection[str], index: bytes) -> list[str]:
    try:
        files = sorted(set(json.loads(index)["weight_map"].values()))
        absent = [str(name) for name in files if name not in names]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelNotFoundError(f"model={model!r}: {INDEX} is damaged: {error!r}") from error
    if absent:
        raise ModelNotFoundError(f"model={model!r}: {INDEX} names files that do not exist: {_few(absent)}")
    return files


def _gguf(model: str, names: Collection[str], wanted: str, separator: str) -> Choice:
    if wanted not in names:
        options = _gguf_options(names)
        hint = f"its GGUF files: {_as_ids(model, options, separator)}" if options else "it has no GGUF files"
        raise ModelNotFoundError(f"model={model!r}: no file {wanted!r}; {hint}")
    split = _SPLIT.fullmatch(wanted)
    if split is None:
        return Choice((wanted,), wanted)
    parts = [f"{split['stem']}-{n:05}-of-{split['count']}.gguf" for n in range(1, int(split["count"]) + 1)]
    if absent := [part for part in parts if part not in names]:
        raise ModelNotFoundError(f"model={model!r}: the split model lacks {_few(absent)}")
    return Choice(tuple(parts), parts[0])


def _gguf_options(names: Collection[str]) -> list[str]:
    """Every GGUF model, a split one by its first part."""
    found = []
    for name in sorted(names):
        split = _SPLIT.fullmatch(name)
        is_model = name.endswith(".gguf") and not name.rsplit("/", 1)[-1].lower().startswith(_PROJECTOR)
        if is_model and (split is None or int(split["part"]) == 1):
            found.append(name)
    return found


def _as_ids(model: str, options: list[str], separator: str) -> str:
    repository = model.split(":", maxsplit=1)[0].rstrip("/")
    return ", ".join(repository + separator + option for option in options)


def _few(names: list[str], limit: int = 3) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
