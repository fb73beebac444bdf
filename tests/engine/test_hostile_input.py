"""Input that no caller should send: it is refused by name before the scheduler sees it, and hurts nobody else."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo import LLM, AsyncLLM, SamplingParams
from octavo.errors import OctavoError, ParameterError
from octavo.models.catalog import ModelSource, resolve_model
from octavo.models.loader import open_model
from tests.engine.conftest import assert_released

MakeLLM = Callable[..., LLM]
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
USER = {"role": "user", "content": "hi"}
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"


def refused(call: Callable[[], Any], param: str) -> None:
    """The call raises a one-line error that names the parameter."""
    with pytest.raises(ParameterError) as caught:
        call()
    assert caught.value.param == param
    assert param in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def llm(make_llm: MakeLLM) -> LLM:
    """The tiny model."""
    return make_llm()


# -- prompts and parameters ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [b"abc", bytearray(b"abc"), [b"abc"], "\ud800", ["ok", "\ud800"], None, [True]])
def test_a_prompt_that_is_neither_text_nor_token_ids_is_refused(llm: LLM, prompt: Any) -> None:
    refused(lambda: llm.generate(prompt), "prompts")


@pytest.mark.parametrize("ids", ["abc", {"prompt": "abc"}])
def test_token_ids_of_a_mapping_must_be_a_list_of_ids(llm: LLM, ids: Any) -> None:
    refused(lambda: llm.generate({"prompt_token_ids": ids}), "prompt_token_ids")


def test_a_prompt_that_contains_itself_is_refused(llm: LLM) -> None:
    prompt: dict[str, Any] = {}
    prompt["prompt_token_ids"] = prompt
    refused(lambda: llm.generate(prompt), "prompt_token_ids")  # type: ignore[arg-type]


def test_numpy_integers_are_token_ids_like_any_other(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, seed=1)
    plain = llm.generate([5, 6], params)[0]
    for ids in ([np.int64(5), np.int32(6)], np.array([5, 6])):
        assert llm.generate(ids, params)[0].outputs == plain.outputs  # type: ignore[arg-type]


@pytest.mark.parametrize("params", [{}, {"max_tokens": 3}, "abc", 0, [None], [SamplingParams(), 5]])
def test_sampling_params_of_another_type_are_refused(llm: LLM, params: Any) -> None:
    prompts = ["a"] * (len(params) if isinstance(params, list) else 1)
    refused(lambda: llm.generate(prompts, params), "sampling_params")


@pytest.mark.parametrize("salt", [5, b"x", [], "\ud800"])
def test_a_cache_salt_must_be_text(llm: LLM, salt: Any) -> None:
    refused(lambda: llm.generate("a", cache_salt=salt), "cache_salt")


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_words_that_utf8_cannot_hold_or_of_absurd_length_are_refused(name: str) -> None:
    for words in (["\ud800"], ["a" * 10_000] * 7):
        refused(lambda words=words: SamplingParams(**{name: words}), name)  # type: ignore[misc]


def test_a_field_set_to_nonsense_after_the_construction_is_refused(llm: LLM) -> None:
    params = SamplingParams()
    params.truncate_prompt_tokens = "abc"  # type: ignore[assignment]
    refused(lambda: llm.generate("abc", params), "truncate_prompt_tokens")


# -- conversations ---------------------------------------------------------------------------------------------------


def test_arguments_of_a_chat_are_refused_by_their_own_name(llm: LLM) -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    wrong: list[tuple[str, Any]] = [
        ("tools", "abc"),
        ("tools", {"a": 1}),
        ("tools", [1]),
        ("tools", [{"a": object()}]),
        ("chat_template_kwargs", [1]),
        ("chat_template_kwargs", {"a": float("nan")}),
        ("chat_template_kwargs", {"a": deep}),
        ("add_generation_prompt", "yes"),
        ("continue_final_message", None),
        ("chat_template", 5),
        ("chat_template", "{% if %}"),
        ("chat_template", "\ud800"),
        ("chat_template", None),
    ]
    for name, value in wrong:
        arguments: dict[str, Any] = {"chat_template": TEMPLATE, name: value}
        refused(lambda arguments=arguments: llm.chat([USER], **arguments), name)  # type: ignore[misc]
    for content in (deep, object(), float("nan"), "\ud800"):
        refused(lambda c=content: llm.chat([{**USER, "content": c}], chat_template=TEMPLATE), "messages")  # type: ignore[misc]


def test_what_a_template_raises_is_one_line_and_a_template_that_writes_nothing_is_refused(llm: LLM) -> None:
    refused(lambda: llm.chat([USER], chat_template="{{ raise_exception('no\nway') }}"), "messages")
    refused(lambda: llm.chat([USER], chat_template=""), "prompts")


# -- configuration ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", None),
        ("tokenizer", 5),
        ("tokenizer", ""),
        ("chat_template", 5),
        ("gpu_memory_utilization", "x"),
        ("gpu_memory_utilization", None),
        ("max_logprobs", None),
        ("model", "\ud800"),
        ("kv_cache_memory_bytes", 1 << 50),
        ("num_gpu_blocks_override", 1 << 30),
    ],
)
def test_an_engine_argument_of_a_wrong_kind_or_size_is_refused_by_name(
    make_llm: MakeLLM, name: str, value: Any
) -> None:
    refused(lambda: make_llm(**{name: value}), name)


@pytest.mark.parametrize("model", ["a" * 5000, "a/-b", "a/b--c", "~nobody-of-this-name/x"])
def test_a_name_that_no_model_can_have_is_an_error_of_the_model(model: str) -> None:
    with pytest.raises(OctavoError, match="model="):
        resolve_model(model)


# -- damaged files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("num_hidden_layers", ["x", 0, 1.5, 10**9, {}]),
        ("num_attention_heads", [{}, 0, [None]]),
        ("num_key_value_heads", [3, "x"]),
        ("head_dim", [10**12, "x"]),
        ("max_position_embeddings", [-1, 1, 1.5, 10**12, True, {}]),
        ("rms_norm_eps", ["x", [], float("nan")]),
        ("rope_parameters", [5, {"rope_theta": "x"}, {"rope_type": []}]),
        ("eos_token_id", ["x", -1, [None]]),
        ("architectures", [5, [[]]]),
        ("quantization_config", ["x"]),
    ],
)
def test_a_configuration_of_impossible_values_is_refused(
    tiny_model: Path, tmp_path: Path, field: str, values: list[Any]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    given = json.loads((tiny_model / "config.json").read_text())
    for value in values:
        (folder / "config.json").write_text(json.dumps({**given, field: value}))
        with pytest.raises(OctavoError):
            open_model(ModelSource("m", folder))


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", "[" * 100_000),
        ("generation_config.json", "[]"),
        ("generation_config.json", '{"temperature": "hot"}'),
        ("generation_config.json", '{"eos_token_id": "x"}'),
        ("model.safetensors.index.json", '{"weight_map": {"a": 5}}'),
        ("model.safetensors.index.json", '{"weight_map": []}'),
    ],
)
def test_a_damaged_file_of_a_model_is_refused_at_start(
    make_llm: MakeLLM, tiny_model: Path, tmp_path: Path, file: str, text: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / file).write_text(text)
    with pytest.raises(OctavoError):
        make_llm(folder)


# -- threads, loops and ends -----------------------------------------------------------------------------------------


def test_callers_on_eight_threads_get_their_own_tokens_while_the_cache_is_reset(make_llm: MakeLLM) -> None:
    llm = make_llm(num_gpu_blocks_override=40)

    def run(i: int) -> list[int]:
        params = SamplingParams(max_tokens=15, seed=i)
        return llm.generate([[i + 3] * (7 * i + 1)], params)[0].outputs[0].token_ids

    alone = [run(i) for i in range(8)]
    found: dict[int, list[int]] = {}

    def call(i: int) -> None:
        llm.reset_prefix_cache()
        found[i] = run(i)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(8)] == alone


def test_choices_with_every_option_survive_a_storm_of_preemptions(make_llm: MakeLLM) -> None:
    prompts = [[(7 * i + j) % 300 + 3 for j in range(10 + 4 * i)] for i in range(8)]
    params = [
        SamplingParams(
            n=1 + i % 4,
            seed=i,
            max_tokens=25,
            ignore_eos=True,
            min_tokens=3,
            logprobs=3,
            prompt_logprobs=2 if i % 2 else None,
            top_k=50,
            presence_penalty=0.5,
            frequency_penalty=0.3,
            repetition_penalty=1.2,
        )
        for i in range(8)
    ]
    roomy, small = make_llm(), make_llm(num_gpu_blocks_override=8, max_model_len=100)
    alone = [roomy.generate(p, s)[0] for p, s in zip(prompts, params, strict=True)]
    together = small.generate(prompts, params)
    assert small.stats()["preemptions"] > 0
    for ours, theirs in zip(together, alone, strict=True):
        assert ours.outputs == theirs.outputs
        assert ours.prompt_logprobs == theirs.prompt_logprobs


def test_a_request_whose_event_loop_was_closed_is_aborted_and_others_go_on(tiny_model: Path) -> None:
    llm = AsyncLLM(str(tiny_model), backend="reference", dtype="float32", disable_log_stats=True)

    async def first() -> Any:
        stream = llm.generate("abc", LONG)
        await anext(stream)
        return stream

    async def whole() -> Any:
        return [output async for output in llm.generate("abc", SamplingParams(max_tokens=5, ignore_eos=True))][-1]

    loop = asyncio.new_event_loop()
    kept = loop.run_until_complete(first())
    loop.close()
    while llm.stats()["num_running"]:  # far fewer steps than the request would take
        asyncio.run(whole())
    assert llm.stats()["generation_tokens"] < 400
    assert_released(llm)  # type: ignore[arg-type]
    llm.shutdown()
    del kept


_AT_EXIT = """
import asyncio, sys, threading
from octavo import LLM, AsyncLLM, SamplingParams
settings = dict(backend="reference", dtype="float32", disable_log_stats=True)
params = SamplingParams(max_tokens=500, ignore_eos=True)
llm, other = AsyncLLM(sys.argv[1], **settings), LLM(sys.argv[1], **settings)
threading.Thread(target=lambda: other.generate(["a", "b"], params), daemon=True).start()
async def main():
    stream = llm.generate("abc", params)
    await anext(stream)
    globals()["kept"] = stream
    raise KeyError("consumer")
asyncio.run(main())
"""


def test_an_interpreter_that_ends_with_running_requests_neither_hangs_nor_crashes(tiny_model: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", _AT_EXIT, str(tiny_model)], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 1
    assert result.stderr.rstrip().endswith("KeyError: 'consumer'")


# -- command line ----------------------------------------------------------------------------------------------------


def _octavo(*arguments: str, stdin: bytes | None = b"", **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "octavo", *arguments]
    if stdin is None:
        command = ["sh", "-c", '"$@" <&-', "sh", *command]
    return subprocess.run(
        command, input=stdin or b"", capture_output=True, timeout=120, check=False, env={**os.environ, **environment}
    )


def test_the_command_refuses_bad_prompts_in_one_line_with_exit_code_2(tmp_path: Path) -> None:
    torn = tmp_path / "torn.jsonl"
    torn.write_text('{"prompt": "a"}\n{"prompt": "a\n')
    deep = tmp_path / "deep.jsonl"
    deep.write_text('{"prompt":' * 100_000)
    for arguments, stdin in (
        (["-f", str(torn)], b""),
        (["-f", str(deep)], b""),
        ([], b"\xff\xfe"),
        ([], b""),
        ([], None),
    ):
        result = _octavo("generate", *arguments, stdin=stdin)
        assert result.returncode == 2, (arguments, stdin, result.stderr)
        assert result.stderr.startswith(b"octavo: ")
        assert result.stderr.count(b"\n") == 1


def test_the_command_writes_any_text_whatever_the_encoding_of_its_output(tiny_model: Path, tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text('"a\u2028b"\n', encoding="utf-8")
    settings = ["--backend", "reference", "--dtype", "float32", "--max-tokens", "2", "--json"]
    result = _octavo("generate", str(tiny_model), "-f", str(lines), *settings, PYTHONIOENCODING="ascii")
    assert result.returncode == 0, result.stderr
    assert rb"a\u2028b" in result.stdout
