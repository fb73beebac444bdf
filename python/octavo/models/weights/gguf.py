"""GGUF files: metadata and tensors, of one file or of all its parts. The one place that knows how the header is parsed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from octavo._core import Gguf
from octavo.models.weights.base import MappedFile, MappedTensor, WeightError
from octavo.ops.base import StoredTensor

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


class GgufFile:
    """Metadata (plain Python values) and tensors of a GGUF file.

    A file whose `split.count` is above 1 is the first part of a checkpoint, named `…-00001-of-0000N.gguf`; the tensors are those of
    all parts, which lie beside it. A tensor of a storage type that is not supported raises `WeightError`, and so does a damaged
    or truncated file, a part that is missing or in the wrong place, and a tensor that two parts hold.
    """

    def __init__(self, path: Path):
        self.path = path
        header = _open(path)
        self.metadata: Mapping[str, Any] = header.metadata()
        tensors: dict[str, StoredTensor] = {}
        for part, part_header in _parts(path, header, self.metadata):
            file = MappedFile(part)
            for name, dims, storage, offset, _ in part_header.tensors():
                if name in tensors:
                    raise WeightError(f"{part}: tensor {name} is also in another part")
                tensors[name] = MappedTensor(file, name, tuple(reversed(dims)), storage, offset)
        expected = _integer(path, self.metadata, "split.tensors.count", len(tensors))
        if expected != len(tensors):
            raise WeightError(f"{path}: split.tensors.count is {expected}, the parts hold {len(tensors)} tensors")
        self.tensors: Mapping[str, StoredTensor] = tensors


def _open(path: Path) -> Gguf:
    if not path.is_file():
        raise WeightError(f"{path}: no such file")
    try:
        return Gguf(path)
    except ValueError as error:
        raise WeightError(f"{path}: {error}") from error


def _integer(path: Path, metadata: Mapping[str, Any], key: str, default: int) -> int:
    value = metadata.get(key, default)
    if not isinstance(value, int):
        raise WeightError(f"{path}: {key} is {value!r}, not an integer")
    return value


def _parts(path: Path, first: Gguf, metadata: Mapping[str, Any]) -> Iterator[tuple[Path, Gguf]]:
    """Every part with its header, in order; a file that is not split is its only part."""
    yield path, first
    count = _integer(path, metadata, "split.count", 1)
    if count <= 1:
        return
    name = _PART.fullmatch(path.name)
    if name is None or int(name["count"]) != count:
        raise WeightError(f"{path}: split.count is {count}, so the name must end in -00001-of-{count:05d}.gguf")
    if _integer(path, metadata, "split.no", 0) != 0 or int(name["number"]) != 1:
        begin = f"{name['stem']}-00001-of-{count:05d}.gguf"
        raise WeightError(f"{path}: split.no is {metadata.get('split.no')}, give the first part, {begin}")
    for number in range(1, count):
        part = path.with_name(f"{name['stem']}-{number + 1:05d}-of-{count:05d}.gguf")
        header = _open(part)
        found = header.metadata()
        if (found.get("split.no"), found.get("split.count")) != (number, count):
            raise WeightError(
                f"{part}: split.no is {found.get('split.no')} of split.count {found.get('split.count')}, "
                f"expected {number} of {count}"
            )
        yield part, header
