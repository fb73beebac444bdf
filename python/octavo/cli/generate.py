"""`octavo generate`: complete prompts from the command line, a file, or stdin."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from octavo.cli.options import engine_options, sampling_options
from octavo.cli.prompts import read_prompts
from octavo.cli.terminal import write
from octavo.config import EngineConfig
from octavo.errors import ContextLengthError, ParameterError
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.sampling_params import SamplingParams


@engine_options
@sampling_options
def generate(
    config: EngineConfig,
    sampling: dict[str, Any],
    model: str | None = typer.Argument(None, help="Model: built-in name, hub id, folder or .gguf file."),
    prompt: list[str] | None = typer.Option(None, "--prompt", "-p", help="A prompt; may be given many times."),
    file: list[Path] | None = typer.Option(
        None,
        "--file",
        "-f",
        help="A file, or - for stdin: each line of a .jsonl is a prompt (text, or {'prompt': …}), any other file is one.",
    ),
    lines: bool = typer.Option(False, "--lines", help="Each line of a file or of stdin is a prompt."),
    chat: bool = typer.Option(
        False, "--chat", help="Wrap each prompt as a user's message in the model's chat template."
    ),
    system: str | None = typer.Option(None, "--system", help="System message; implies --chat."),
    as_json: bool = typer.Option(
        False, "--json", help="One JSON object for each prompt: text, token_ids, finish_reason, usage."
    ),
    n: int | None = typer.Option(None, help="Choices for each prompt."),
    logprobs: int | None = typer.Option(None, help="With --json: this many likeliest tokens at each position."),
) -> None:
    """Complete prompts.

    One prompt is answered as it is written; of many, prompts and answers are printed in order. Without -p and -f the prompt
    is read from standard input.

    \b
    Examples:
      octavo generate -p "The capital of France is"
      octavo generate --chat -p "Why is the sky blue?" --max-tokens 100
      octavo generate --system "Answer in French." -p "Hello!" --temperature 0
      echo "Once upon a time" | octavo generate --max-tokens 50
      octavo generate -f essay.txt --lines -f questions.txt --chat
      octavo generate org/model -f prompts.jsonl --json > out.jsonl

    Exit code: 0 if every prompt has its answer, 1 if one failed while it ran, 2 if an argument or prompt is wrong
    (nothing has run then), 130 if interrupted.
    """
    given = {**sampling, **{name: value for name, value in (("n", n), ("logprobs", logprobs)) if value is not None}}
    SamplingParams(**given)  # wrong values are told before anything is read or loaded
    prompts = read_prompts(prompt or [], file or [], lines)
    head = [] if system is None else [{"role": "system", "content": system}]
    conversation = (lambda text: [*head, {"role": "user", "content": text}]) if chat or head else None
    from octavo.llm import LLM  # noqa: PLC0415  loads torch

    config.disable_log_stats = config.disable_log_stats or not sys.stderr.isatty()
    with LLM.from_config(config) as llm:
        if len(prompts) == 1 and not as_json and (n or 1) == 1:
            failed = _stream(llm, prompts[0], given, conversation)
        else:
            failed = _print_all(llm, prompts, given, conversation, as_json)
    if failed:
        raise typer.Exit(1)


_Conversation = Callable[[str], list[dict[str, Any]]] | None


def _params(llm: Any, given: dict[str, Any], conversation: _Conversation) -> SamplingParams:
    defaults: SamplingParams = llm.engine.default_sampling_params(chat=conversation is not None)
    return replace(defaults, **given)


def _stream(llm: Any, prompt: str, given: dict[str, Any], conversation: _Conversation) -> bool:
    """Prints one answer as it grows; whether it failed."""
    shown, error = "", None
    try:
        for output in llm.stream(conversation(prompt) if conversation else prompt, _params(llm, given, conversation)):
            text, error = output.outputs[0].text, output.error
            write(text[len(shown) :])
            shown = text
    finally:
        write("\n")
    if error is not None:
        _tell(f"the prompt failed: {error}")
    return error is not None


def _print_all(llm: Any, prompts: list[str], given: dict[str, Any], conversation: _Conversation, as_json: bool) -> bool:
    """Prints the answers in the order of the prompts, each as soon as those before it are there; whether one failed."""
    params = _params(llm, given, conversation)
    submissions = []
    for number, prompt in enumerate(_parsed(llm, prompts, conversation), start=1):
        try:
            submissions.append(llm.engine.submission(prompt, params))
        except ContextLengthError as error:
            allowed = f"{error.allowed}; prompt {number} of {len(prompts)} is longer"
            raise ParameterError("prompt", error.value, allowed) from error
    failed = False
    for prompt, output in zip(prompts, _in_order(llm, submissions), strict=True):
        failed = failed or output.error is not None
        if as_json:
            print(json.dumps(_as_json(output), ensure_ascii=False), flush=True)
            continue
        if output.error is not None:
            _tell(f"a prompt failed: {output.error}")
        for choice in output.outputs:
            write(f"{prompt}\n{choice.text}\n\n" if conversation else f"{prompt}{choice.text}\n")
    return failed


def _parsed(llm: Any, prompts: list[str], conversation: _Conversation) -> list[Any]:
    """The prompts with their token ids, made on all cores."""
    from octavo.inputs import ChatOptions, parse_prompts  # noqa: PLC0415

    if conversation is None:
        return list(llm.engine.tokenize(parse_prompts(prompts)))
    return list(llm.engine.render_chats([conversation(prompt) for prompt in prompts], ChatOptions()))


def _in_order(llm: Any, submissions: list[Any]) -> Iterator[RequestOutput]:
    from octavo.progress import RequestProgress  # noqa: PLC0415

    # A bar among the answers would be unreadable.
    quiet = sys.stdout is not None and sys.stdout.isatty()
    with llm.engine.submit(submissions) as batch, RequestProgress(len(submissions), not quiet) as progress:
        waiting = iter(list(batch.assemblers.values()))
        head = next(waiting, None)
        for output in batch.updates():
            if output.finished:
                progress.advance(output)
            while head is not None and head.output.finished:
                yield head.output
                head = next(waiting, None)


def _tell(message: str) -> None:
    print(f"octavo: {message}", file=sys.stderr, flush=True)


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
    if output.error is not None:
        found["error"] = output.error
    return found


def _choice(choice: CompletionOutput) -> dict[str, Any]:
    found: dict[str, Any] = {
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
    }
    if choice.message is not None:
        found["message"] = choice.message.to_dict()
    if choice.logprobs is not None:
        found["logprobs"] = [
            [{"id": token, "token": entry.decoded_token, "logprob": entry.logprob} for token, entry in position.items()]
            for position in choice.logprobs
        ]
    return found
