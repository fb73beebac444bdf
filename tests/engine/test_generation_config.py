"""Where a request's parameters come from: the request, then a flag, then the model's file, then built-in values."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter

from octavo import LLM, SamplingParams
from octavo.defaults import default_sampling_params, load_sampling_defaults
from octavo.errors import ModelError, ParameterError

MakeLLM = Callable[..., LLM]
PROMPT = [5, 6, 7]


@pytest.fixture
def model_with(tiny_model: Path, tmp_path: Path) -> Callable[..., Path]:
    """Copies the tiny model, with fields of its generation_config.json."""

    def make(**fields: Any) -> Path:
        folder = tmp_path / "model"
        shutil.copytree(tiny_model, folder, dirs_exist_ok=True)
        (folder / "generation_config.json").write_text(json.dumps(fields))
        return folder

    return make


def defaults(folder: Path | None, where: str = "auto", override: dict[str, Any] | None = None) -> SamplingParams:
    return default_sampling_params(load_sampling_defaults(where, override, folder))


# -- the order -------------------------------------------------------------------------------------------------------


def test_without_flag_and_file_values_are_built_in(tmp_path: Path) -> None:
    assert defaults(tmp_path) == SamplingParams()
    assert load_sampling_defaults("auto", None, tmp_path).describe() == "built in"


def test_the_file_wins_over_built_in_values_field_by_field(model_with: Callable[..., Path]) -> None:
    folder = model_with(temperature=0.3, top_k=7, top_p=None, max_new_tokens=33, transformers_version="5")
    assert defaults(folder) == SamplingParams(temperature=0.3, top_k=7, max_tokens=33)


def test_a_flag_wins_over_the_file_field_by_field(model_with: Callable[..., Path]) -> None:
    folder = model_with(temperature=0.3, top_k=7)
    assert defaults(folder, override={"top_k": 9, "min_p": 0.1}) == SamplingParams(temperature=0.3, top_k=9, min_p=0.1)
    assert defaults(folder, "none", {"top_k": 9}) == SamplingParams(top_k=9)


def test_a_request_wins_over_flag_and_file(make_llm: MakeLLM, model_with: Callable[..., Path]) -> None:
    folder = model_with(temperature=2.0, top_k=50, max_new_tokens=3)
    llm = make_llm(folder, override_generation_config={"max_new_tokens": 5})
    assert len(llm.generate(PROMPT)[0].outputs[0].token_ids) <= 5
    ignoring = replace(llm.get_default_sampling_params(), ignore_eos=True)
    assert len(llm.generate(PROMPT, ignoring)[0].outputs[0].token_ids) == 5
    own = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
    plain = make_llm(generation_config="none").generate(PROMPT, own)[0].outputs[0]
    assert llm.generate(PROMPT, own)[0].outputs[0].token_ids == plain.token_ids
    assert len(plain.token_ids) == 7


def test_a_chat_uses_the_rest_of_the_context_unless_a_default_says_otherwise(
    make_llm: MakeLLM, model_with: Callable[..., Path]
) -> None:
    assert make_llm().engine.default_sampling_params(chat=True).max_tokens is None
    assert make_llm(model_with(max_new_tokens=3)).engine.default_sampling_params(chat=True).max_tokens == 3


def test_the_file_may_be_another_folders(model_with: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "generation_config.json").write_text('{"top_k": 11}')
    assert defaults(model_with(top_k=7), str(tmp_path / "other")).top_k == 11
    with pytest.raises(ParameterError, match="generation_config must be 'auto', 'none', or a folder"):
        defaults(model_with(top_k=7), str(tmp_path / "nowhere"))


@pytest.mark.parametrize("where", ["none", "vllm"])
def test_the_file_can_be_ignored_even_if_its_values_are_impossible(
    make_llm: MakeLLM, model_with: Callable[..., Path], where: str
) -> None:
    llm = make_llm(model_with(temperature="hot", top_k=7), generation_config=where)
    assert llm.get_default_sampling_params() == SamplingParams()


def test_a_model_that_does_not_sample_is_greedy(model_with: Callable[..., Path]) -> None:
    assert defaults(model_with(do_sample=False, temperature=0.6)).temperature == 0.0
    assert defaults(model_with(do_sample=True, temperature=0.6)).temperature == 0.6


def test_the_start_says_which_fields_come_from_where(
    make_llm: MakeLLM, model_with: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = model_with(temperature=0.5, top_k=7)
    make_llm(folder, override_generation_config={"top_k": 9, "min_p": 0.1}, disable_log_stats=False)
    expected = (
        "temperature=0.5 (generation_config.json); top_k=9, min_p=0.1 (override_generation_config); others built in"
    )
    assert f"sampling defaults: {expected}\n" in capfd.readouterr().err


def test_the_command_takes_the_flag_as_json_and_its_own_options_win(model_with: Callable[..., Path]) -> None:
    folder = model_with(max_new_tokens=3, temperature=0.0)
    run = [sys.executable, "-m", "octavo", "generate", str(folder), "-p", "a", "--ignore-eos", "--json"]
    run += ["--backend", "reference", "--override-generation-config", '{"max_new_tokens": 4}']

    def count(*more: str) -> int:
        result = subprocess.run([*run, *more], capture_output=True, text=True, check=True, env=dict(os.environ))
        return len(json.loads(result.stdout)["token_ids"])

    assert count() == 4
    assert count("--max-tokens", "6") == 6


# -- GGUF ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def gguf_with(tmp_path: Path) -> Callable[..., Path]:
    """Writes a GGUF file of metadata alone."""

    def make(**fields: float) -> Path:
        path = tmp_path / "model.gguf"
        writer = GGUFWriter(path, "llama")
        for name, value in fields.items():
            key = f"general.sampling.{name}"
            if isinstance(value, int):
                writer.add_int32(key, value)
            else:
                writer.add_float32(key, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return path

    return make


def test_a_gguf_files_metadata_is_its_generation_config(gguf_with: Callable[..., Path]) -> None:
    path = gguf_with(temp=0.7, top_k=20, top_p=0.95, min_p=0.05, penalty_repeat=1.05, penalty_last_n=64)
    found = load_sampling_defaults("auto", None, path)
    assert default_sampling_params(found) == SamplingParams(
        temperature=0.7, top_k=20, top_p=0.95, min_p=0.05, repetition_penalty=1.05
    )
    assert found.describe().endswith("(model.gguf); others built in")
    assert defaults(path, "none") == SamplingParams()
    assert defaults(path, override={"top_k": 3}).top_k == 3


def test_an_impossible_value_of_a_gguf_file_is_named(gguf_with: Callable[..., Path]) -> None:
    path = gguf_with(top_p=7.0)
    with pytest.raises(ParameterError, match=r"generation_config must be .*\(top_p must be .*\), got '"):
        defaults(path)


# -- wrong values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -1),
        ("top_k", 1.5),
        ("top_p", [0.9]),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("max_new_tokens", 0),
        ("max_new_tokens", True),
    ],
)
def test_an_impossible_value_names_the_file_and_the_field(
    model_with: Callable[..., Path], field: str, value: Any
) -> None:
    name = "max_tokens" if field == "max_new_tokens" else field
    with pytest.raises(
        ParameterError, match=rf"generation_config must be .* \({name} must be .*\), got '/.*"
    ) as caught:
        defaults(model_with(**{field: value}))
    assert "'none' to ignore it" in str(caught.value)
    with pytest.raises(ParameterError, match=rf"override_generation_config must be .* \({name} must be"):
        defaults(None, override={field: value})


@pytest.mark.parametrize("value", ["[1]", "{", 5, "5", {"temprature": 1}, {"seed": 1}])
def test_a_flag_that_is_no_mapping_of_known_fields_is_refused(make_llm: MakeLLM, value: Any) -> None:
    with pytest.raises(ParameterError, match="override_generation_config must be"):
        make_llm(override_generation_config=value)


# -- ends of a text --------------------------------------------------------------------------------------------------


def test_every_end_of_sequence_id_of_the_file_ends_a_text(make_llm: MakeLLM, model_with: Callable[..., Path]) -> None:
    llm = make_llm(model_with(eos_token_id=[41, 42]))
    for token in (1, 41, 42):  # 1 is the config.json's
        forced = SamplingParams(max_tokens=5, logit_bias={token: 100.0}, temperature=0)
        output = llm.generate(PROMPT, forced)[0].outputs[0]
        assert (output.finish_reason, output.token_ids) == ("stop", [token])
    other = llm.generate(PROMPT, SamplingParams(max_tokens=5, logit_bias={43: 100.0}, temperature=0))[0].outputs[0]
    assert (other.finish_reason, other.token_ids) == ("length", [43] * 5)


@pytest.mark.parametrize("ids", ["x", [1, None], -1, [10**9]])
def test_an_end_of_sequence_id_that_is_no_token_is_refused(
    make_llm: MakeLLM, model_with: Callable[..., Path], ids: Any
) -> None:
    with pytest.raises((ModelError, ParameterError), match=r"(?i)token id|eos_token_id"):
        make_llm(model_with(eos_token_id=ids))
