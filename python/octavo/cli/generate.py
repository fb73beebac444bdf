"""`octavo generate`: complete prompts from the command line, a file, or stdin."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from octavo.cli.options import engine_options
from octavo.config import EngineConfig
from octavo.errors import ParameterError
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams

_SAMPLING = "Sampling"


def _option(help_text: str, *flags: str) -> Any:
    return typer.Option(None, *flags, help=help_text, rich_help_panel=_SAMPLING)


@engine_options
def generate(  # one parameter for each option of the command line
    config: EngineConfig,
    model: str | None = typer.Argument(None, help="Model: built-in name, hub id, folder or .gguf file."),
    prompt: list[str] | None = typer.Option(None, "--prompt", "-p", help="A prompt; may be given many times."),
    file: list[Path] | None = typer.Option(
        None,
        "--file",
        "-f",
        help="A file: each line of a .jsonl is a prompt (text, or {'prompt': …}), any other file is one.",
    ),
    chat: bool = typer.Option(
        False, "--chat", help="Wrap each prompt as a user's message in the model's chat template."
    ),
    system: str | None = typer.Option(None, "--system", help="System message; implies --chat."),
    as_json: bool = typer.Option(
        False, "--json", help="One JSON object for each prompt: text, token_ids, finish_reason, usage."
    ),
    max_tokens: int | None = _option("Output tokens at most (16 by default; with --chat, the rest of the context)."),
    temperature: float | None = _option("0 is greedy."),
    top_p: float | None = _option("Keep the likeliest tokens whose probabilities reach this."),
    top_k: int | None = _option("Keep this many of the likeliest tokens."),
    min_p: float | None = _option("Drop tokens less likely than this times the likeliest."),
    presence_penalty: float | None = _option("Subtracted from the logit of each token already written."),
    frequency_penalty: float | None = _option("The same, for each time it was written."),
    repetition_penalty: float | None = _option("Makes tokens of prompt and output less likely; 1 is neutral."),
    sampling_seed: int | None = _option("Seed of this command's draws.", "--sampling-seed"),
    n: int | None = _option("Choices for each prompt."),
    stop: list[str] | None = _option("End before this text; may be given many times."),
    min_tokens: int | None = _option("Output tokens before which the model may not end."),
    ignore_eos: bool | None = _option("Go on to --max-tokens whatever the model says."),
    logprobs: int | None = _option("With --json: this many likeliest tokens at each position."),
) -> None:
    """Complete prompts.

    Examples:

      octavo generate -p "The capital of France is"

      octavo generate --chat -p "Why is the sky blue?" --max-tokens 100

      octavo generate org/model -f prompts.jsonl --json > out.jsonl

      echo "Once upon a time" | octavo generate --temperature 0
    """
    given = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "repetition_penalty": repetition_penalty,
        "seed": sampling_seed,
        "n": n,
        "stop": stop or None,
        "min_tokens": min_tokens,
        "ignore_eos": ignore_eos,
        "logprobs": logprobs,
    }
    prompts = _prompts(prompt or [], file or [])
    _generate(
        config, prompts, {k: v for k, v in given.items() if v is not None}, chat or system is not None, system, as_json
    )


def _generate(
    config: EngineConfig, prompts: list[str], given: dict[str, Any], chat: bool, system: str | None, as_json: bool
) -> None:
    SamplingParams(**given)  # wrong values are told before the model is loaded
    from octavo.llm import LLM  # noqa: PLC0415  loads torch

    config.disable_log_stats = config.disable_log_stats or not sys.stderr.isatty()
    with LLM.from_config(config) as llm:
        params = replace(llm.engine.default_sampling_params(chat=chat), **given)
        head = [{"role": "system", "content": system}] if system is not None else []
        conversations = [[*head, {"role": "user", "content": p}] for p in prompts]
        if len(prompts) == 1 and params.n == 1 and not as_json:
            shown = ""
            for output in llm.stream(conversations[0] if chat else prompts[0], params):
                text = output.outputs[0].text
                print(text[len(shown) :], end="", flush=True)
                shown = text
            print()
            return
        outputs = llm.chat(conversations, params) if chat else llm.generate(prompts, params)
    for output in outputs:
        print(json.dumps(_as_json(output), ensure_ascii=False) if as_json else _as_text(output))


def _prompts(given: list[str], files: list[Path]) -> list[str]:
    prompts = list(given)
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ParameterError("file", str(path), f"a readable UTF-8 file ({error})") from error
        prompts += (
            # Not splitlines(): JSON strings may hold other separators of lines.
            [_line(path, line) for line in text.split("\n") if line.strip()] if path.suffix == ".jsonl" else [text]
        )
    # A closed standard input is None.
    if not prompts and sys.stdin is not None and not sys.stdin.isatty():
        try:
            text = sys.stdin.buffer.read().decode()
        except UnicodeDecodeError as error:
            raise ParameterError("prompt", "standard input", f"UTF-8 text ({error})") from error
        prompts = [text.removesuffix("\n")] if text else []
    if not prompts:
        raise ParameterError("prompt", None, "given: use -p TEXT, -f FILE, or pipe text in")
    return prompts


def _line(path: Path, line: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        if line.lstrip().startswith("{"):
            raise ParameterError("file", str(path), f"lines of text or of valid JSON ({error})") from error
        return line
    if isinstance(value, dict):
        value = value.get("prompt")
    if not isinstance(value, str):
        raise ParameterError(
            "file", str(path), f"lines of text, JSON strings or objects with 'prompt', not {line[:60]!r}"
        )
    return value


def _as_text(output: RequestOutput) -> str:
    return "\n".join(f"{output.prompt or ''}{choice.text}" for choice in output.outputs)


def _as_json(output: RequestOutput) -> dict[str, Any]:
    first, *others = output.outputs
    completion = sum(len(choice.token_ids) for choice in output.outputs)
    found: dict[str, Any] = {
        "prompt": output.prompt,
        **_choice(first),
        "usage": {
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": completion,
            "total_tokens": len(output.prompt_token_ids) + completion,
            "cached_tokens": output.num_cached_tokens,
        },
    }
    if others:
        found["choices"] = [_choice(choice) for choice in output.outputs]
    return found


def _choice(choice: Any) -> dict[str, Any]:
    found = {"text": choice.text, "token_ids": choice.token_ids, "finish_reason": choice.finish_reason}
    if choice.logprobs is not None:
        found["logprobs"] = [
            [{"id": token, "token": entry.decoded_token, "logprob": entry.logprob} for token, entry in position.items()]
            for position in choice.logprobs
        ]
    return found
