"""safetensors: one file, or a folder whose `model.safetensors.index.json` says which file holds which tensor.

The index is the law: every file it names must be there and hold the tensors it assigns to it; other tensors and other
files are not read. The format: 8 bytes little-endian header length, a JSON header, then the data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.errors import ModelError
from octavo.models.weights.base import MappedFile, MappedTensor, WeightError
from octavo.ops.base import StoredTensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_HEADER = 100 << 20


class SafetensorsFile:
    """The tensors of one file. Raises `WeightError` for a damaged header or a truncated file."""

    def __init__(self, path: Path):
        self.path = path
        file = MappedFile(path)
        length = int.from_bytes(file.bytes[:8].tobytes(), "little")
        if file.size < 8 or length > min(_MAX_HEADER, file.size - 8):
            raise WeightError(
                f"{path}: header of {length} bytes in a file of {file.size}: no safetensors, or truncated"
            )
        try:
            header = json.loads(file.bytes[8 : 8 + length].tobytes(), object_pairs_hook=_unique)
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            self.tensors: dict[str, StoredTensor] = {
                name: _tensor(file, name, entry, 8 + length) for name, entry in entries.items()
            }
        except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
            if isinstance(error, WeightError):
                raise
            raise WeightError(f"{path}: damaged safetensors header: {error!r}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a name that occurs twice is an error instead of the last one winning."""
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ModelError(f"{next(n for n in names if names.count(n) > 1)} occurs twice")
    return result


def _tensor(file: MappedFile, name: str, entry: Mapping[str, Any], data_start: int) -> MappedTensor:
    begin, end = entry["data_offsets"]
    tensor = MappedTensor(file, name, tuple(entry["shape"]), entry["dtype"], data_start + begin)
    if tensor.num_bytes != end - begin:
        raise WeightError(
            f"{file.path}: tensor {name} of shape {list(tensor.shape)} and type {tensor.storage} "
            f"needs {tensor.num_bytes} bytes, the header gives it {end - begin}"
        )
    return tensor


class SafetensorsFolder:
    """The tensors of a folder: those the index names, else those of `model.safetensors`, else of the only file.

    Raises:
        WeightError: a file of the index is absent, or lacks a tensor that the index assigns to it.
    """

    def __init__(self, path: Path):
        self.path = path
        index_path = path / INDEX
        if not index_path.exists():
            self.tensors: Mapping[str, StoredTensor] = SafetensorsFile(_single_file(path)).tensors
            return
        try:
            weight_map: dict[str, str] = json.loads(index_path.read_text(), object_pairs_hook=_unique)["weight_map"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise WeightError(f"{index_path}: damaged index: {error!r}") from error
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise WeightError(
                f"{index_path}: damaged index: weight_map does not map names of tensors to names of files"
            )
        files = {}
        for name in sorted(set(weight_map.values())):
            if Path(name).name != name:
                raise WeightError(f"{index_path}: file {name!r} lies outside the folder")
            if not (path / name).is_file():
                tensors = sorted(t for t, f in weight_map.items() if f == name)
                raise WeightError(
                    f"{path / name}: missing; the index assigns {len(tensors)} tensors to it, e.g. {tensors[0]}"
                )
            files[name] = SafetensorsFile(path / name)
        self.tensors = {}
        for tensor, name in weight_map.items():
            if tensor not in files[name].tensors:
                raise WeightError(f"{path / name}: tensor {tensor} is missing; the index assigns it to this file")
            self.tensors[tensor] = files[name].tensors[tensor]


def _single_file(path: Path) -> Path:
    if (path / SINGLE).is_file():
        return path / SINGLE
    found = sorted(path.glob("*.safetensors"))
    if len(found) != 1:
        names = [file.name for file in found]
        raise WeightError(f"{path}: neither {INDEX} nor {SINGLE}, and {len(found)} other safetensors files: {names}")
    return found[0]
