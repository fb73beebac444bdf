"""A model found on disk, and the error for one that is not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from octavo.errors import ModelError


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model found on disk: `path` is a folder with `config.json` and safetensors, or a `.gguf` file."""

    name: str
    """As the user wrote it."""
    path: Path


class ModelNotFoundError(ModelError):
    """`model` names nothing that exists or can be fetched; the message says what was tried."""
