"""What every test may use: the built-in model's file, and small random models made by transformers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.models.catalog import resolve_model

if not torch.cuda.is_available():
    # Kernels run in Triton's interpreter; its library functions read this when they are imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def ordered_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter adds up products in their order. Its own are BLAS's, whose order depends on where in a tile an output
    lies, which that of tensor cores does not."""
    if torch.cuda.is_available():
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(_self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        left, right = (part.data.astype(np.float32) for part in (a, b))
        total = np.broadcast_to(d.data.astype(np.float32), (len(left), right.shape[1])).copy()
        product = np.empty_like(total)
        for column, row in zip(left.T, right, strict=True):
            total += np.multiply(column[:, None], row, out=product)
        return TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M, downloaded once."""
    return resolve_model("smollm2-135m").path


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """Outputs of transformers, llama.cpp and vLLM on SmolLM2-135M."""
    return json.loads((Path(__file__).parent / "golden" / "smollm2-135m.json").read_text())


# Also what runs without a GPU, in the interpreter or on the CPU, and takes the GPU where there is one.
_ON_DEVICE = ("tests/kernels/", "tests/unit/ops/", "tests/unit/models/test_family_")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where there is a GPU, every test that runs on it is one of `make test-gpu`."""
    if not torch.cuda.is_available():
        return
    for item in items:
        if any(part in item.path.as_posix() for part in _ON_DEVICE):
            item.add_marker(pytest.mark.gpu)
