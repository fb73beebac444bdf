"""Commands in pipes and files: what they read, what they write, how they end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import EXACT, octavo

SHORT = [*EXACT, "--max-tokens", "4", "--temperature", "0", "--ignore-eos"]


def texts(stdout: bytes) -> list[str]:
    return [json.loads(one)["prompt"] for one in stdout.decode().splitlines()]


# -- generate --------------------------------------------------------------------------------------------------------


def test_prompts_come_from_options_files_and_stdin_in_order(base_model: Path, tmp_path: Path) -> None:
    lines, whole = tmp_path / "a.jsonl", tmp_path / "b.txt"
    lines.write_text('"json"\r\n{"prompt": "object"}\n\nplain\n')
    whole.write_text("two\nlines\n")
    files = ["-f", str(lines), "-f", "-", "-f", str(whole)]
    result = octavo("generate", str(base_model), "-p", "option", *files, "--json", *SHORT, stdin=b"piped\ntext\n")
    assert result.returncode == 0, result.stderr
    assert texts(result.stdout) == ["option", "json", "object", "plain", "piped\ntext", "two\nlines\n"]
    result = octavo("generate", str(base_model), "--lines", "--json", *SHORT, stdin=b"one\n\n  two\r\nthree")
    assert texts(result.stdout) == ["one", "  two", "three"]


def test_an_object_of_json_has_its_fields_and_choices(base_model: Path) -> None:
    result = octavo("generate", str(base_model), "-p", "hi", "--json", "--n", "2", "--logprobs", "1", *SHORT)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert len(found["token_ids"]) == 4
    assert found["finish_reason"] == "length"
    assert found["usage"] == {"prompt_tokens": 2, "completion_tokens": 8, "total_tokens": 10, "cached_tokens": 0}
    assert [choice["token_ids"] for choice in found["choices"]] == [found["token_ids"]] * 2
    assert len(found["logprobs"]) == 4


def test_an_object_of_a_chat_has_the_message_too(chat_model: Path) -> None:
    found = json.loads(octavo("generate", str(chat_model), "-p", "hi", "--chat", "--json", *SHORT).stdout)
    assert found["message"] == {"role": "assistant", "content": found["text"]}


def test_one_prompt_gives_its_completion_and_many_give_prompts_and_completions(chat_model: Path) -> None:
    one = octavo("generate", str(chat_model), *SHORT, stdin=b"hello\n").stdout.decode()
    two = octavo("generate", str(chat_model), "-p", "hello", "-p", "bye", *SHORT).stdout.decode()
    assert two.startswith(f"hello{one}")
    assert "\nbye" in two
    asked = octavo("generate", str(chat_model), "--system", "s", "-p", "hello", "-p", "bye", *SHORT).stdout.decode()
    assert asked.startswith("hello\n")
    assert "<user>" not in asked


def test_a_prompt_that_is_too_long_is_named_and_nothing_runs(base_model: Path) -> None:
    result = octavo("generate", str(base_model), "-p", "fine", "-p", "x" * 600, *SHORT)
    assert result.returncode == 2
    assert result.stdout == b""
    assert b"prompt 2 of 2 is longer" in result.stderr
    assert result.stderr.count(b"\n") == 1


def test_a_reader_that_leaves_early_is_no_error(base_model: Path) -> None:
    arguments = [sys.executable, "-m", "octavo", "generate", str(base_model), "--json", "--lines", *SHORT]
    prompts = "\n".join(f"prompt {i}" for i in range(40))
    command = ["sh", "-c", '"$@" 2>&1 >&3 | cat >&2', "sh", *arguments]
    pipe = subprocess.run(
        ["sh", "-c", '{ "$@"; } 3>&1 | head -n 1', "sh", *command],
        input=prompts.encode(),
        capture_output=True,
        timeout=180,
        check=False,
    )
    assert texts(pipe.stdout) == ["prompt 0"]
    assert pipe.stderr == b""


# -- chat in a pipe --------------------------------------------------------------------------------------------------


def test_each_piped_line_has_its_answer_and_nothing_else_is_written(chat_model: Path) -> None:
    result = octavo("chat", str(chat_model), *SHORT, stdin=b"hello\n\n/system be brief\nagain", FORCE_COLOR="1")
    assert result.returncode == 0, result.stderr
    assert b"\x1b" not in result.stdout + result.stderr
    assert b"system: be brief" in result.stderr
    hello = octavo("generate", str(chat_model), "--chat", "-p", "hello", *SHORT).stdout
    assert result.stdout.startswith(hello)
    assert len(result.stdout) > len(hello)


def test_a_piped_line_that_fails_is_told_and_the_next_is_answered(chat_model: Path) -> None:
    long = b"x" * 300
    result = octavo(
        "chat", str(chat_model), *SHORT, "--max-model-len", "100", stdin=b"\xff\n/nothing\n" + long + b"\nhello\n"
    )
    assert result.returncode == 1
    assert result.stdout.strip()
    told = result.stderr.decode().splitlines()
    assert all(line.startswith("octavo: ") for line in told)
    for word, line in zip(("standard input must be text", "/nothing", "context is full"), told, strict=True):
        assert word in line


def test_a_base_model_is_refused_in_one_line_with_the_way_out(base_model: Path) -> None:
    result = octavo("chat", str(base_model), *EXACT, stdin=b"hello\n")
    assert result.returncode == 2
    assert result.stderr.count(b"\n") == 1
    assert b"octavo generate" in result.stderr
    assert b"--chat-template FILE" in result.stderr
    result = octavo("chat", str(base_model), *SHORT, "--chat-template", "{{ messages[0].content }}", stdin=b"hello\n")
    assert result.returncode == 0, result.stderr


# -- help and mistakes -----------------------------------------------------------------------------------------------


def test_octavo_alone_shows_first_steps() -> None:
    result = octavo()
    assert result.returncode == 0
    for command in (b"octavo chat", b"octavo generate -p", b"octavo batch", b"octavo models"):
        assert command in result.stdout


@pytest.mark.parametrize("command", ["chat", "generate", "batch"])
def test_the_help_of_a_command_has_examples(command: str) -> None:
    result = octavo(command, "--help")
    assert result.returncode == 0
    examples = result.stdout.decode().partition("Examples:\n")[2].partition("\n\n")[0].splitlines()
    assert len(examples) >= 3
    assert all(f"octavo {command}" in line for line in examples)
    assert b"Exit code: 0" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["chat", "--n-ctx", "5"], "no such option: --n-ctx; octavo calls it --max-model-len; see octavo chat --help"),
        (["generate", "--n_ctx=5"], "octavo calls it --max-model-len"),
        (["batch", "a", "b", "--mem-fraction-static", "0.5"], "octavo calls it --gpu-memory-utilization"),
        (["generate", "--no-such-thing"], "--no-such-thing"),
        (["generate", "--top-k", "x"], "'--top-k'"),
        (["genrate"], "generate"),
        (["batch", "only-one"], "OUTPUT.jsonl"),
        (["chat", "--temperature", "-1"], "temperature must be from 0"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line_with_the_way_out(arguments: list[str], words: str) -> None:
    result = octavo(*arguments)
    assert result.returncode == 2
    assert result.stdout == b""
    assert result.stderr.count(b"\n") == 1
    assert words in result.stderr.decode()
