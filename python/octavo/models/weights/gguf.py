"""GGUF files: metadata and tensors. The one place that knows how the header is parsed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo._core import Gguf
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
            header = Gguf(path)
        except ValueError as error:
            raise WeightError(f"{path}: {error}") from error
        self.metadata: Mapping[str, Any] = header.metadata()
        file = MappedFile(path)
        self.tensors: Mapping[str, StoredTensor] = {
            name: MappedTensor(file, name, tuple(reversed(dims)), storage, offset)
            for name, dims, storage, offset, _ in header.tensors()
        }
