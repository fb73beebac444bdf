"""What every test may use: the built-in model's file, and small random models made by transformers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.models.catalog import resolve_model

if not torch.cuda.is_available():
    # Kernels run in Triton's interpreter; its library functions read this when they are imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M, downloaded once."""
    return resolve_model("smollm2-135m").path


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """Outputs of transformers, llama.cpp and vLLM on SmolLM2-135M."""
    return json.loads((Path(__file__).parent / "golden" / "smollm2-135m.json").read_text())
