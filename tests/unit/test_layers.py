"""Imports go downward only, as the table of docs/engine.md says."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "python" / "octavo"

# What each part must not import, at any depth of its files.
FORBIDDEN = {
    "engine": (
        "torch",
        "octavo.models",
        "octavo.ops",
        "octavo.worker",
        "octavo.sampling",
        "octavo.llm",
        "octavo.requests",
    ),
    "worker": ("octavo.llm", "octavo.async_llm", "octavo.requests", "octavo.cli", "octavo.text", "octavo.startup"),
    "models/decoder.py": ("torch", "numpy", "octavo.worker", "octavo.engine", "octavo.sampling"),
    "models/blocks": ("torch", "numpy", "octavo.worker", "octavo.engine", "octavo.sampling"),
    "models/spec.py": ("torch", "numpy", "octavo"),
    "models/families": (
        "torch",
        "octavo.worker",
        "octavo.engine",
        "octavo.ops.reference",
        "octavo.ops.cpu",
        "octavo.sampling",
    ),
    "models": ("octavo.worker", "octavo.engine", "octavo.sampling", "octavo.llm"),
    "ops": ("octavo.models", "octavo.worker", "octavo.engine", "octavo.sampling", "octavo.llm"),
    "sampling": ("octavo.models", "octavo.ops", "octavo.worker", "octavo.engine", "octavo.llm"),
    "cli/main.py": ("torch",),
    "cli/options.py": ("torch",),
    "cli/serve.py": ("torch", "octavo.startup", "octavo.engine_process", "octavo.llm"),
    "config.py": ("torch", "octavo.models", "octavo.llm"),
}


def imported_modules(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


@pytest.mark.parametrize("part", FORBIDDEN)
def test_a_layer_imports_nothing_from_above(part: str) -> None:
    path = PACKAGE / part
    files = [path] if path.suffix == ".py" else sorted(path.rglob("*.py"))
    assert files
    for file in files:
        for module in imported_modules(file):
            for forbidden in FORBIDDEN[part]:
                assert not f"{module}.".startswith(f"{forbidden}."), f"{file}: imports {module}"
