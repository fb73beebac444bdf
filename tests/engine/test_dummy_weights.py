"""`load_format="dummy"`: an engine without a checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import ParameterError
from octavo.models.catalog import ModelNotFoundError

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def bare(tiny_model: Path, tmp_path: Path) -> str:
    """A folder with a configuration and nothing else."""
    shutil.copy(tiny_model / "config.json", tmp_path / "config.json")
    return str(tmp_path)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_configuration_alone_gives_the_same_tokens_every_time(bare: str, backend: str) -> None:
    found = []
    for _ in range(2):
        with LLM(bare, load_format="dummy", skip_tokenizer_init=True, backend=backend, disable_log_stats=True) as llm:
            found.append(llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids)
    assert len(found[0]) == 6
    assert found[0] == found[1]


def test_without_it_weights_are_missed(bare: str) -> None:
    with pytest.raises(ModelNotFoundError, match="safetensors"):
        LLM(bare, skip_tokenizer_init=True)


def test_other_formats_are_refused_by_name() -> None:
    with pytest.raises(ParameterError, match="load_format"):
        LLM("smollm2-135m", load_format="pickle")
