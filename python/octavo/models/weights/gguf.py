"""GGUF files: metadata and tensors. The one place that knows how the header is parsed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gguf import GGUFReader

from octavo.models.weights.base import MappedFile, MappedTensor, WeightError
from octavo.ops.base import StoredTensor


class GgufFile:
    """Metadata (plain Python values) and tensors of a GGUF file.

    A tensor of a storage type that is not supported raises `WeightError`, and so does a damaged or truncated file.
    """

    def __init__(self, path: Path):
        self.path = path
        if not path.is_file():
            raise WeightError(f"{path}: no such file")
        try:
            reader = GGUFReader(path)
        except (ValueError, IndexError, KeyError, OSError, OverflowError) as error:
            raise WeightError(f"{path}: damaged GGUF header: {error}") from error
        self.metadata: Mapping[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        file = MappedFile(path)
        self.tensors: Mapping[str, StoredTensor] = {
            tensor.name: MappedTensor(
                file,
                tensor.name,
                tuple(int(size) for size in reversed(tensor.shape)),
                tensor.tensor_type.name,
                int(tensor.data_offset),
            )
            for tensor in reader.tensors
        }
