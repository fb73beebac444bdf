"""octavo: an LLM inference engine with a Rust control plane and a Python data plane."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo._core import __version__

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM
    from octavo.llm import LLM
    from octavo.outputs import CompletionOutput, RequestOutput
    from octavo.sampling_params import BeamSearchParams, SamplingParams
    from octavo.structured_outputs import StructuredOutputsParams

_HOMES = {
    "LLM": "octavo.llm",
    "AsyncLLM": "octavo.async_llm",
    "SamplingParams": "octavo.sampling_params",
    "StructuredOutputsParams": "octavo.structured_outputs",
    "BeamSearchParams": "octavo.sampling_params",
    "RequestOutput": "octavo.outputs",
    "CompletionOutput": "octavo.outputs",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Loads a public name at its first use, so that `import octavo` and `octavo --help` do not load torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    import importlib  # noqa: PLC0415

    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
