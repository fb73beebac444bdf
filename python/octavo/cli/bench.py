"""`octavo bench`: measurements of this engine on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import typer

from octavo.cli.options import engine_options
from octavo.config import EngineConfig
from octavo.errors import ParameterError

bench_app = typer.Typer(help="Measure the engine on this machine.", no_args_is_help=True, rich_markup_mode=None)

_MODEL = typer.Argument(None, help="Model: built-in name, hub id, folder or .gguf file.")
_JSON = typer.Option(False, "--json", help="One JSON object instead of a table.")


@bench_app.command("latency")
@engine_options
def latency(
    config: EngineConfig,
    model: str | None = _MODEL,
    input_len: int = typer.Option(128, help="Tokens of the prompt."),
    output_len: int = typer.Option(64, help="Tokens of the answer."),
    repeats: int = typer.Option(5, help="Measured runs; the median counts. One more warms up."),
    as_json: bool = _JSON,
) -> None:
    """One request alone: time to first token, prefill and decode speed, distance to the memory limit.

    Example:  octavo bench latency --input-len 1024 --output-len 1
    """
    _require({"input_len": input_len, "output_len": output_len, "repeats": repeats})
    from octavo.benchmark import speed  # noqa: PLC0415  loads torch
    from octavo.llm import LLM  # noqa: PLC0415

    with LLM.from_config(config) as llm:
        _print(asdict(speed.latency(llm, input_len, output_len, repeats)), as_json)


@bench_app.command("throughput")
@engine_options
def throughput(
    config: EngineConfig,
    model: str | None = _MODEL,
    num_prompts: int = typer.Option(32, help="Requests, sent at once."),
    input_len: int = typer.Option(128, help="Tokens of each prompt."),
    output_len: int = typer.Option(64, help="Tokens of each answer."),
    shared_prefix_len: int = typer.Option(0, help="Tokens at the beginning that all prompts share."),
    as_json: bool = _JSON,
) -> None:
    """Many requests at once: tokens a second, prefix hits, waste of the KV cache.

    Example:  octavo bench throughput --num-prompts 64 --shared-prefix-len 96
    """
    _require({"num_prompts": num_prompts, "input_len": input_len, "output_len": output_len})
    if not 0 <= shared_prefix_len <= input_len:
        raise ParameterError("shared_prefix_len", shared_prefix_len, f"from 0 to input_len ({input_len})")
    from octavo.benchmark import speed  # noqa: PLC0415  loads torch
    from octavo.llm import LLM  # noqa: PLC0415

    with LLM.from_config(config) as llm:
        vocab = llm.engine.vocab_size
        shared = speed.random_prompt(shared_prefix_len, vocab, seed=0)
        own = input_len - shared_prefix_len
        prompts = [shared + speed.random_prompt(own, vocab, seed=1 + i) for i in range(num_prompts)]
        _print(asdict(speed.throughput(llm, prompts, output_len)), as_json)


def _require(values: dict[str, int]) -> None:
    for name, value in values.items():
        if value < 1:
            raise ParameterError(name, value, "at least 1")


def _print(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:24} {value:,.3f}" if isinstance(value, float) else f"{name:24} {value}")
