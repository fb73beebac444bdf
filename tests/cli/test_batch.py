"""`octavo batch`: every line has its result, whatever the line and whatever ended the run before."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.batch.results import Results
from octavo.batch.runner import BatchRunner
from octavo.batch.source import MAX_LINE_BYTES, Defaults, count_lines, read_entries
from octavo.errors import ParameterError
from tests.cli.conftest import ENVIRONMENT, EXACT, octavo
from tests.engine.speaker import make_speaker

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"


def line(custom_id: str, url: str = CHAT, **body: Any) -> str:
    if url == CHAT:
        body.setdefault("messages", [{"role": "user", "content": f"I am {custom_id}"}])
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def run(llm: LLM, source: Path, output: Path, limit: int = 4) -> tuple[BatchRunner, list[dict[str, Any]]]:
    """Runs a batch in this process and returns its results."""
    defaults = Defaults(llm.engine.default_sampling_params(chat=True), llm.engine.default_sampling_params())
    with source.open("rb") as file, Results(output) as results:
        runner = BatchRunner(llm.engine, "tiny", results, limit, lambda _: None)
        assert runner.run(read_entries(file, defaults))
    return runner, read(output)


def read(output: Path) -> list[dict[str, Any]]:
    return [json.loads(one) for one in output.read_text(encoding="utf-8").splitlines()]


def by_id(results: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {one["custom_id"]: one for one in results}


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def test_answers_are_those_of_the_engine_with_ids_and_usage(small_llm: LLM, files: tuple[Path, Path]) -> None:
    source, output = files
    settings = {"temperature": 0, "max_tokens": 7, "ignore_eos": True}
    source.write_text("\n".join([line("a", **settings), line("b", COMPLETION, prompt="hello", **settings)]))
    found = by_id(run(small_llm, source, output)[1])
    expected = small_llm.chat([{"role": "user", "content": "I am a"}], SamplingParams(**settings), use_tqdm=False)[0]
    response = found["a"]["response"]
    assert (found["a"]["id"], found["a"]["error"], response["status_code"]) == ("batch_req_1", None, 200)
    body = response["body"]
    assert (body["object"], body["model"]) == ("chat.completion", "tiny")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": expected.outputs[0].text, "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    prompt = len(expected.prompt_token_ids)
    assert body["usage"]["total_tokens"] == prompt + 7
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (prompt, 7)
    text = small_llm.generate("hello", SamplingParams(**settings), use_tqdm=False)[0].outputs[0].text
    assert found["b"]["response"]["body"]["choices"][0]["text"] == text
    assert found["b"]["response"]["body"]["object"] == "text_completion"


def test_choices_of_many_prompts_are_numbered_through(small_llm: LLM, files: tuple[Path, Path]) -> None:
    source, output = files
    source.write_text(line("a", COMPLETION, prompt=["one", "two"], n=3, seed=5, max_tokens=4, echo=True))
    body = run(small_llm, source, output)[1][0]["response"]["body"]
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert [choice["text"][:3] for choice in body["choices"]] == ["one"] * 3 + ["two"] * 3
    params = SamplingParams(n=3, seed=5, max_tokens=4)
    expected = small_llm.generate(["one", "two"], params, use_tqdm=False)
    texts = [output.prompt + choice.text for output in expected for choice in output.outputs]  # type: ignore[operator]
    assert [choice["text"] for choice in body["choices"]] == texts


def test_logprobs_have_the_forms_of_the_protocol(small_llm: LLM, files: tuple[Path, Path]) -> None:
    source, output = files
    settings = {"seed": 1, "max_tokens": 6, "ignore_eos": True}
    source.write_text(
        "\n".join(
            [
                line("chat", logprobs=True, top_logprobs=3, **settings),
                line("echo", COMPLETION, prompt="hé there", logprobs=2, echo=True, **settings),
                line("ids", COMPLETION, prompt=[60, 61, 62], logprobs=0, echo=True, **settings),
            ]
        )
    )
    found = by_id(run(small_llm, source, output)[1])
    content = found["chat"]["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert len(content) == 6
    for token in content:
        likeliest = [top["logprob"] for top in token["top_logprobs"]]
        assert len(likeliest) == 3
        assert likeliest == sorted(likeliest, reverse=True)
        assert token["logprob"] in likeliest or token["logprob"] <= likeliest[-1]
    for name in ("echo", "ids"):
        choice = found[name]["response"]["body"]["choices"][0]
        logprobs, usage = choice["logprobs"], found[name]["response"]["body"]["usage"]
        assert {len(logprobs[key]) for key in logprobs} == {usage["total_tokens"]}
        assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
        assert all(value < 0 for value in logprobs["token_logprobs"][1:])
        assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    choice = found["echo"]["response"]["body"]["choices"][0]
    assert choice["text"].startswith("hé there")
    # Two tokens of the prompt are the halves of one character; where others begin, their text is.
    prompt = found["echo"]["response"]["body"]["usage"]["prompt_tokens"]
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert "\ufffd" in tokens[:prompt]
    assert offsets[prompt] == len("hé there")
    for token, offset in zip(tokens[:prompt], offsets, strict=False):
        if "\ufffd" not in token:
            assert choice["text"][offset:].startswith(token)


def test_a_line_that_offers_tools_gets_the_calls_and_the_reasoning_of_the_answer(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    source, output = files
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    text = f"<think>\nhm\n</think>\n\n{call}\n{call.replace('Oslo', 'Bergen')}"
    template = (
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% if false %}<tool_call></think>{% endif %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    )
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    asks: dict[str, Any] = {"temperature": 0, "tools": tools}
    lines = [
        line("both", **asks),
        line("one", parallel_tool_calls=False, **asks),
        line("none", tool_choice="none", response_format={"type": "text"}, **asks),
        line("cut", stop='"Bergen', **asks),
        line("short", max_tokens=1, **asks),
        line("forced", tool_choice="required", **asks),
        line("schema", response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}, **asks),
    ]
    source.write_text("\n".join(lines))
    model = make_speaker(tmp_path / "model", text, template)
    with LLM(str(model), backend="reference", dtype="float32", disable_log_stats=True) as llm:
        found = by_id(run(llm, source, output)[1])
    choices = {}
    for name in ("both", "one", "none", "cut", "short"):
        (choices[name],) = found[name]["response"]["body"]["choices"]
    both = choices["both"]
    assert both["finish_reason"] == "tool_calls"
    message = both["message"]
    assert (message["role"], message["content"], message["reasoning_content"]) == ("assistant", None, "hm\n")
    assert [(one["type"], one["function"]["name"]) for one in message["tool_calls"]] == [("function", "weather")] * 2
    cities = [json.loads(one["function"]["arguments"])["city"] for one in message["tool_calls"]]
    assert cities == ["Oslo", "Bergen"]
    assert len({one["id"] for one in message["tool_calls"]}) == 2
    assert [json.loads(one["function"]["arguments"]) for one in choices["one"]["message"]["tool_calls"]] == [
        {"city": "Oslo"}
    ]
    assert choices["none"]["finish_reason"] == "stop"
    assert choices["none"]["message"]["content"] == text.partition("</think>\n\n")[2]
    assert "tool_calls" not in choices["none"]["message"]
    assert choices["cut"]["message"]["tool_calls"][1]["function"]["arguments"] == '{"city": '
    assert choices["short"]["finish_reason"] == "length"
    (forced,) = found["forced"]["response"]["body"]["choices"]
    assert {one["function"]["name"] for one in forced["message"]["tool_calls"]} == {"weather"}
    (held,) = found["schema"]["response"]["body"]["choices"]
    assert held["message"].get("tool_calls") or json.loads(held["message"]["content"]) is not None, "a call or the form"


def test_each_wrong_line_gives_its_error_and_the_others_run(small_llm: LLM, files: tuple[Path, Path]) -> None:
    source, output = files
    wrong = {
        b"nonsense": "line",
        b'{"custom_id": "half", ': "line",
        b'\xff{"custom_id": "bytes"}': "line",
        b"[1, 2]": "line",
        b"[" * 100_000: "line",
        b'{"custom_id": "nan", "url": NaN}': "line",
        b'{"method": "POST"}': "custom_id",
        b'{"custom_id": 7}': "custom_id",
        b'{"custom_id": "\\ud800"}': "custom_id",
        b'{"custom_id": "w1", "method": "GET", "url": "/v1/completions", "body": {}}': "method",
        b'{"custom_id": "w2", "method": "POST", "url": "/v1/embeddings", "body": {}}': "url",
        b'{"custom_id": "w3", "method": "POST", "url": ["/v1/completions"], "body": {}}': "url",
        b'{"custom_id": "w4", "method": "POST", "url": "/v1/completions"}': "body",
        b'{"custom_id": "w5", "method": "POST", "url": "/v1/completions", "body": {}, "extra": 1}': "extra",
        line("w6", stream=True).encode(): "stream",
        line("w7", response_format={"type": "xml"}).encode(): "response_format",
        line("w8", messages=[{"role": "user", "content": "x" * 5000}]).encode(): "prompt",
        line("w9", logprobs=True, top_logprobs=60_000).encode(): "top_logprobs",
        line("w10", COMPLETION, prompt=["fine", [2**62]]).encode(): "prompt_token_ids",
        line("w11", stop_token_ids=[320]).encode(): "stop_token_ids",
        line("w12", **{"\ud800": 1}).encode(): "\ud800",
        line("w13", priority="high").encode(): "priority",
        line("w14", tools=[{"type": "function", "function": {"name": "f"}}]).encode(): "tools",
    }
    good = line("good", max_tokens=3).encode()
    source.write_bytes(b"\n".join([*wrong, b"", b"   ", good]) + b"\n")
    _, results = run(small_llm, source, output)
    assert len(results) == len(wrong) + 1
    assert by_id(results)["good"]["response"]["status_code"] == 200
    errors = {one["id"]: one for one in results if one["error"] is not None}
    for number, (text, param) in enumerate(wrong.items(), start=1):
        one = errors[f"batch_req_{number}"]
        error = one["response"]["body"]["error"]
        assert (one["response"]["status_code"], error["param"]) == (400, param), text
        assert error["message"].startswith(f"line {number}: ")
        assert "\n" not in error["message"]
        assert one["error"]["message"] == error["message"]
    assert errors["batch_req_17"]["error"]["code"] == "context_length_exceeded"


def test_a_line_too_long_to_be_read_is_skipped_whole(
    small_llm: LLM, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MAX_LINE_BYTES >= 1 << 20
    monkeypatch.setattr("octavo.batch.source.MAX_LINE_BYTES", 1000)
    source, output = files
    source.write_text("\n".join([line("long", user="x" * 5000), line("short", max_tokens=2)]))
    _, results = run(small_llm, source, output)
    assert [(one["id"], one["response"]["status_code"]) for one in results] == [
        ("batch_req_1", 400),
        ("batch_req_2", 200),
    ]


def test_a_second_use_of_a_custom_id_is_an_error_and_the_first_has_its_answer(
    small_llm: LLM, files: tuple[Path, Path]
) -> None:
    source, output = files
    source.write_text("\n".join([line("a", max_tokens=2), line("a", max_tokens=2)]))
    for _ in range(2):  # a second run adds nothing
        _, results = run(small_llm, source, output)
        status = {one["id"]: one["response"]["status_code"] for one in results}
        assert status == {"batch_req_1": 200, "batch_req_2": 400}
        assert len(results) == 2
    duplicate = next(one for one in results if one["id"] == "batch_req_2")
    assert (duplicate["custom_id"], duplicate["error"]["code"]) == ("a", "duplicate_custom_id")


@pytest.mark.parametrize("cut", ["none", "in the last line", "in its first byte", "before its newline"])
def test_a_resumed_batch_computes_what_is_missing_and_nothing_else(
    small_llm: LLM, files: tuple[Path, Path], cut: str
) -> None:
    source, output = files
    lines = [line(f"r{i}", max_tokens=3, temperature=0) for i in range(6)]
    source.write_text("\n".join([*lines[:3], "nonsense", *lines[3:]]))
    _, whole = run(small_llm, source, output, limit=1)
    data = output.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == 10]
    kept = ends[3]
    end = {
        "none": kept,
        "in the last line": kept + 40,
        "in its first byte": kept + 1,
        "before its newline": ends[4] - 1,
    }
    output.write_bytes(data[: end[cut]])
    runner, resumed = run(small_llm, source, output)
    assert runner.skipped == 4
    assert output.read_bytes()[:kept] == data[:kept]
    assert len(resumed) == 7

    def essence(one: dict[str, Any]) -> Any:
        return one["id"], one["custom_id"], one["response"]["body"].get("choices")

    assert sorted(map(essence, resumed), key=str) == sorted(map(essence, whole), key=str)


def test_a_file_of_something_else_is_never_touched(tmp_path: Path) -> None:
    for text in ("my notes", "my notes\n", '{"id": 3}\n', "[]\n", "\n", '{"id": "batch_req_1"}\nrest'):
        path = tmp_path / "notes"
        path.write_text(text)
        with pytest.raises(ParameterError, match="--restart writes it anew") as caught:
            Results(path)
        assert caught.value.param == "output"
        assert path.read_text() == text
    with Results(path, restart=True) as results:
        assert results.written == 0
    assert path.read_text() == ""


def test_two_processes_do_not_write_the_same_results(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with path.open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ParameterError, match="no other process"):
            Results(path)
    with Results(path):
        pass


def test_no_more_requests_than_allowed_are_in_flight_and_the_input_is_read_as_it_is_needed(
    small_llm: LLM, files: tuple[Path, Path]
) -> None:
    source, output = files
    source.write_text("".join(line(f"r{i}", max_tokens=2) + "\n" for i in range(30)))
    taken = written = 0
    most = 0
    defaults = Defaults(small_llm.engine.default_sampling_params(chat=True), SamplingParams())

    def entries(file: Any) -> Any:
        nonlocal taken, most
        for entry in read_entries(file, defaults):
            taken += 1
            most = max(most, taken - written)
            yield entry

    def progress(is_new: bool) -> None:
        nonlocal written
        written += is_new

    with source.open("rb") as file, Results(output) as results:
        assert BatchRunner(small_llm.engine, "tiny", results, 5, progress).run(entries(file))
    assert written == 30
    assert most == 5


def test_lines_are_counted_with_or_without_an_end(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    for text, lines in (("", 0), ("a", 1), ("a\n", 1), ("a\nb", 2), ("\n\n", 2)):
        path.write_text(text)
        assert count_lines(path) == lines


# -- as a process ----------------------------------------------------------------------------------------------------


def start(*arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "octavo", "batch", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, **ENVIRONMENT})


def wait_for_lines(process: subprocess.Popen[bytes], output: Path, lines: int) -> None:
    while not output.exists() or output.read_bytes().count(b"\n") < lines:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)


def test_a_batch_that_was_killed_and_one_that_was_stopped_go_on_to_the_results_of_an_undisturbed_one(
    chat_model: Path, tmp_path: Path
) -> None:
    source, output, undisturbed = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    settings = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}
    source.write_text("".join(line(f"r{i}", **settings) + "\n" for i in range(150)))
    arguments = [str(source), str(output), str(chat_model), *EXACT, "--max-requests-in-flight", "3"]
    killed = start(*arguments)
    wait_for_lines(killed, output, 10)
    killed.kill()
    killed.wait()
    done = output.read_bytes()
    assert done.count(b"\n") < 150
    output.write_bytes(done[: done.rindex(b"\n", 0, -1) + 30])  # as if it was killed while it wrote

    stopped = start(*arguments)
    wait_for_lines(stopped, output, 30)
    stopped.send_signal(signal.SIGINT)
    _, told = stopped.communicate(timeout=120)
    assert stopped.returncode == 130
    assert b"Traceback" not in told
    assert b"the same command goes on where it stopped" in told
    assert 30 <= output.read_bytes().count(b"\n") < 150
    assert output.read_bytes().endswith(b"\n")

    last = octavo("batch", *arguments)
    assert last.returncode == 0, last.stderr
    whole = octavo("batch", str(source), str(undisturbed), str(chat_model), *EXACT)
    assert whole.returncode == 0, whole.stderr

    def choices(path: Path) -> list[Any]:
        return sorted((one["custom_id"], one["response"]["body"]["choices"]) for one in read(path))

    assert len(read(output)) == 150
    assert choices(output) == choices(undisturbed)


def test_the_command_says_what_was_written_and_its_exit_code_tells_of_errors(chat_model: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(line("a", model="gpt-x", max_tokens=2) + "\nnonsense\n")
    result = octavo("batch", str(source), str(output), str(chat_model), *EXACT)
    assert result.returncode == 1
    assert b"2 results written (0 were there), 1 errors" in result.stderr
    assert b"names other models (gpt-x)" in result.stderr
    assert b"\x1b" not in result.stderr
    assert result.stdout == b""


def test_files_that_cannot_be_used_are_refused_in_one_line_before_the_model_is_loaded(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("")
    for arguments, words in (
        ([str(tmp_path / "none"), str(output)], b"input must be a readable file"),
        ([str(source), str(source)], b"another file than the input"),
        ([str(source), str(tmp_path / "no" / "folder")], b"output must be a file that can be written"),
        ([str(source), str(output), "--max-requests-in-flight", "0"], b"max_requests_in_flight must be at least 1"),
    ):
        result = octavo("batch", *arguments)
        assert result.returncode == 2
        assert result.stderr.startswith(b"octavo: ")
        assert words in result.stderr
        assert result.stderr.count(b"\n") == 1
