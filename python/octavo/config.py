"""The one argument list of `LLM()` and of every command, checked before anything is loaded.

Owns names, defaults and ranges; knows nothing of devices or models.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from octavo.errors import ParameterError, check_text
from octavo.message_format import check_parsers

Backend = Literal["auto", "reference", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
LogprobsMode = Literal["raw", "processed"]
LoadFormat = Literal["auto", "dummy"]

DEFAULT_MODEL = "smollm2-135m"


def _arg(default: Any, help_text: str) -> Any:
    """A field with the text that `--help` shows."""
    return field(default=default, metadata={"help": help_text})


@dataclass(slots=True)
class EngineConfig:
    """Everything that can be said about an engine at its start; names follow vLLM's.

    Raises:
        ParameterError: a value is out of range; the message names the argument and the way out.
    """

    model: str = _arg(DEFAULT_MODEL, "Built-in name, hub id, folder or `.gguf` file.")
    tokenizer: str | None = _arg(None, "Folder or `tokenizer.json`; the model's own by default.")
    skip_tokenizer_init: bool = _arg(False, "Take and give token ids only.")
    chat_template: str | None = _arg(None, "A template, or the path of a file with one; the model's own by default.")
    tool_call_parser: str = _arg(
        "auto", "How tool calls are written: a parser's name, `none`, or `auto` (what the chat template calls for)."
    )
    reasoning_parser: str = _arg("auto", "How reasoning is written: a parser's name, `none`, or `auto`.")
    generation_config: str = _arg(
        "auto",
        "Where default sampling parameters come from: `auto` (the model's file) or `vllm`/`none` (built-in values).",
    )
    override_generation_config: dict[str, Any] | None = _arg(
        None, 'Default sampling parameters that win over the file\'s, as JSON: `{"temperature": 0.5}`.'
    )
    load_format: LoadFormat = _arg("auto", "`dummy` takes random weights: for measuring speed without a checkpoint.")
    dtype: DType = _arg("auto", "Type of the activations; `float32` with `backend='reference'` is the exact path.")
    backend: Backend = _arg("auto", "`cuda` where there is a GPU, else `cpu`; `reference` is the plain oracle.")
    max_model_len: int | None = _arg(
        None, "Tokens of prompt and output together; the model's own limit by default, less if the cache is smaller."
    )
    max_num_seqs: int = _arg(256, "Requests that run at once.")
    max_num_batched_tokens: int | None = _arg(None, "Tokens of one step; 8192 on a GPU, 512 on a CPU by default.")
    enforce_eager: bool = _arg(False, "Launch every kernel of a step on its own instead of replaying a CUDA graph.")
    deterministic: bool = _arg(
        False,
        "The same tokens for a request whatever runs beside it, however its prompt is cut, preempted or cached, on the same "
        "kind of device; costs speed. Always so with `backend='reference'` and with `dtype='float32'` on a GPU; not to be had with "
        "`backend='cpu'`.",
    )
    max_in_flight: int | None = _arg(
        None, "Steps scheduled before the first of them is settled; 1 on a CPU, 2 on a GPU by default."
    )
    block_size: int = _arg(16, "Tokens of one KV-cache block: 8 to 128, a power of two.")
    num_gpu_blocks_override: int | None = _arg(None, "Number of KV-cache blocks, whatever the device.")
    kv_cache_memory_bytes: int | None = _arg(None, "Bytes of the KV cache, whatever the device.")
    gpu_memory_utilization: float = _arg(
        0.9, "Share of the GPU's memory that weights, activations and KV cache may take."
    )
    enable_prefix_caching: bool = _arg(True, "Keep the KV cache of shared prefixes.")
    max_logprobs: int = _arg(
        20, "Largest `logprobs` and `prompt_logprobs` a request may ask for; −1 allows the whole vocabulary."
    )
    logprobs_mode: LogprobsMode = _arg(
        "raw", "Report log-probabilities before (`raw`) or after (`processed`) temperature, penalties and masks."
    )
    seed: int = _arg(0, "Seed from which requests without a seed of their own draw theirs.")
    num_threads: int | None = _arg(None, "CPU threads of the model; all cores by default.")
    disable_log_stats: bool = _arg(False, "Do not print the start-up summary.")

    def __post_init__(self) -> None:
        self.override_generation_config = _mapping("override_generation_config", self.override_generation_config)
        self._check_types()
        self.tool_call_parser, self.reasoning_parser = check_parsers(self.tool_call_parser, self.reasoning_parser)
        self._require("max_num_seqs", 1, 4096)
        self._require("max_model_len", 2, 1 << 24)
        self._require("max_num_batched_tokens", 1, 1 << 20)
        self._require("max_in_flight", 1, 8)
        self._require("num_gpu_blocks_override", 2, 1 << 30)
        self._require("kv_cache_memory_bytes", 1, 1 << 50)
        self._require("max_logprobs", -1, 1 << 20)
        self._require("num_threads", 1, 4096)
        if not 8 <= self.block_size <= 128 or self.block_size & (self.block_size - 1):
            raise ParameterError("block_size", self.block_size, "a power of two from 8 to 128")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ParameterError("gpu_memory_utilization", self.gpu_memory_utilization, "above 0 and at most 1")
        if self.num_gpu_blocks_override is not None and self.kv_cache_memory_bytes is not None:
            raise ParameterError(
                "kv_cache_memory_bytes", self.kv_cache_memory_bytes, "unset when num_gpu_blocks_override is given"
            )
        for name, kind in (
            ("backend", Backend),
            ("dtype", DType),
            ("logprobs_mode", LogprobsMode),
            ("load_format", LoadFormat),
        ):
            if getattr(self, name) not in get_args(kind):
                raise ParameterError(name, getattr(self, name), "one of " + ", ".join(get_args(kind)))
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            # A step must have room for one token of every running request.
            self.max_num_seqs = self.max_num_batched_tokens

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> EngineConfig:
        """Builds a config, naming octavo's own argument when another engine's is used."""
        known = {f.name for f in fields(cls)}
        for name, value in kwargs.items():
            if name not in known:
                ours = FOREIGN_ARGUMENTS.get(name)
                hint = f"; octavo calls it {ours!r}" if ours else f"; known arguments: {', '.join(sorted(known))}"
                raise ParameterError(name, value, "a known argument" + hint)
        return cls(**kwargs)

    @property
    def threads(self) -> int:
        """CPU threads the model may use."""
        return self.num_threads or len(os.sched_getaffinity(0))

    def _check_types(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            kind, _, optional = str(f.type).partition(" | ")
            if optional and value is None:
                continue
            if kind == "int" and (isinstance(value, bool) or not isinstance(value, int)):
                raise ParameterError(f.name, value, "an integer")
            if kind == "float" and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise ParameterError(f.name, value, "a number")
            if kind == "str":
                check_text(f.name, value)
            if f.type == "bool" and not isinstance(value, bool):
                raise ParameterError(f.name, value, "True or False")
        for name in ("model", "generation_config", "tokenizer"):
            if getattr(self, name) == "":
                raise ParameterError(name, "", "a non-empty string")

    def _require(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if value is not None and not low <= value <= high:
            raise ParameterError(name, value, f"from {low} to {high}")


def _mapping(name: str, value: object) -> dict[str, Any] | None:
    """A mapping, given as one or, on the command line, as JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ParameterError(name, value, f"a JSON object ({error})") from error
    if value is not None and not isinstance(value, Mapping):
        raise ParameterError(name, value, "a mapping, or a JSON object as text")
    return None if value is None else dict(value)


FOREIGN_ARGUMENTS = {
    "model_path": "model",
    "context_length": "max_model_len",
    "n_ctx": "max_model_len",
    "ctx_size": "max_model_len",
    "n_batch": "max_num_batched_tokens",
    "chunked_prefill_size": "max_num_batched_tokens",
    "max_running_requests": "max_num_seqs",
    "n_parallel": "max_num_seqs",
    "mem_fraction_static": "gpu_memory_utilization",
    "page_size": "block_size",
    "kv_cache_size": "kv_cache_memory_bytes",
    "n_threads": "num_threads",
    "threads": "num_threads",
    "random_seed": "seed",
    "disable_radix_cache": "enable_prefix_caching",
    "enable_deterministic_inference": "deterministic",
    "tokenizer_path": "tokenizer",
}
