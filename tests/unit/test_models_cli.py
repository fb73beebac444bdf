"""`octavo models`: lists, fetches and shows models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.engine.conftest import make_tiny_model

from octavo.models.built_in import BUILT_IN
from octavo.units import format_bytes, format_count


def octavo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "octavo", "models", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Llama with a generation_config.json and no chat template."""
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    (folder / "generation_config.json").write_text('{"top_k": 7, "eos_token_id": 1}')
    return folder


@pytest.fixture(scope="module")
def shown(tiny: Path) -> dict[str, Any]:
    """What `show --json` says of it."""
    result = octavo("show", str(tiny), "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_show_tells_programs_everything(shown: dict[str, Any], tiny: Path) -> None:
    stored = (tiny / "model.safetensors").stat().st_size
    assert shown["path"] == str(tiny)
    assert shown["family"] == "llama"
    assert 0.9 * stored < shown["stored_bytes"] == 4 * shown["parameters"] < stored
    assert (shown["num_layers"], shown["context_length"], shown["vocab_size"]) == (2, 512, 320)
    assert [cost["dtype"] for cost in shown["cache"]] == ["bfloat16", "float32"]
    assert shown["text"] == {"tokenizer": "BPE (tokenizer.json)", "tokens": 320, "has_chat_template": False}
    assert shown["sampling_defaults"] == {"top_k": 7}
    assert shown["fits"][0]["machine"] == "CPU"
    assert shown["fits"][0]["weights_fit"]
    assert shown["fits"][0]["longest_request"] == 512


def test_show_tells_people_the_same_in_plain_lines_when_piped(shown: dict[str, Any], tiny: Path) -> None:
    result = octavo("show", str(tiny))
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout
    for expected in (
        format_count(shown["parameters"]),
        format_bytes(shown["stored_bytes"]),
        "4 heads, 2 key/value heads, of 12 elements",
        "512 tokens",
        "no: probably a base model",
        "top_k=7",
        "512 tokens (the whole context)",
    ):
        assert expected in result.stdout


def test_show_of_a_gguf_file_finds_its_tokenizer_and_template(smollm2_path: Path) -> None:
    found = json.loads(octavo("show", str(smollm2_path), "--json").stdout)
    assert found["text"] == {"tokenizer": "byte-level BPE (GGUF, smollm)", "tokens": 49152, "has_chat_template": True}
    assert found["parameters"] == 134_515_008


def test_show_of_a_model_without_tokenizer_still_tells_about_its_weights(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    (folder / "tokenizer.json").unlink()
    found = json.loads(octavo("show", str(folder), "--json").stdout)
    assert found["text"]["tokenizer"].startswith("none that can be read (")
    assert found["parameters"] > 0


def test_show_of_a_model_that_cannot_be_run_gives_the_reason_in_one_line(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["OtherForCausalLM"]}))
    result = octavo("show", str(folder))
    assert result.returncode == 2
    assert "OtherForCausalLM" in result.stderr
    assert result.stderr.count("\n") == 1


def test_list_names_every_built_in_model_with_its_licence() -> None:
    rows = {row["name"]: row for row in json.loads(octavo("list", "--json").stdout)}
    assert list(rows) == list(BUILT_IN)
    assert "Apache-2.0" in rows["smollm2-135m"]["description"]
    assert "Gemma terms of use" in rows["gemma3-270m"]["description"]
    assert "never redistribute" in rows["gemma3-270m"]["description"]
    assert "smollm2-135m" in octavo().stdout


def test_the_help_says_how_models_are_named() -> None:
    text = octavo("--help").stdout
    for form in ("org/name@revision", "org/name:file.gguf", "path/to/folder", "HF_TOKEN", "show", "fetch", "list"):
        assert form in text


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (999.6, "1.00 kB"),
        (12_345, "12.3 kB"),
        (999_600, "1.00 MB"),
        (3e9, "3.00 GB"),
    ],
)
def test_sizes_have_three_digits_and_a_unit(count: float, expected: str) -> None:
    assert format_bytes(count) == expected


def test_counts_have_no_unit_below_a_thousand() -> None:
    assert [format_count(n) for n in (7, 1500, 134_515_008, 30.5e9)] == ["7", "1.50 k", "135 M", "30.5 B"]
