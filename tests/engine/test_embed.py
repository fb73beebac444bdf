"""`LLM.embed` against the hidden states that transformers computes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, Qwen2Config, Qwen2ForCausalLM

from octavo import LLM, SamplingParams
from octavo.errors import ParameterError
from octavo.pooling import Pooling, finish, model_pooling
from tests.engine.conftest import make_tiny_model

PROMPTS = [[random.Random(length).randrange(3, 300) for _ in range(length)] for length in (1, 2, 15, 16, 17, 90, 300)]


def expected(folder: Path, prompt: list[int], pooling: str) -> torch.Tensor:
    """Of the unnormalised hidden states after the final norm."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        hidden = model(torch.tensor([prompt])).last_hidden_state[0]
    vector: torch.Tensor = hidden[-1] if pooling == "last" else hidden.mean(dim=0)
    return vector


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model."""
    made = make_tiny_model(tmp_path_factory.mktemp(request.param))
    if request.param == "qwen2":
        torch.manual_seed(1)
        config = Qwen2Config(
            vocab_size=320,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            initializer_range=0.25,
            bos_token_id=0,
            eos_token_id=1,
        )
        Qwen2ForCausalLM(config).eval().save_pretrained(made)
    return made


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 32, "max_num_seqs": 4}, {"max_in_flight": 2}])
def test_vectors_are_the_pooled_hidden_states_however_prompts_are_cut(
    folder: Path, make_llm: Callable[..., LLM], pooling: Pooling, settings: dict[str, int]
) -> None:
    llm = make_llm(folder, **settings)
    for _ in range(2):  # the second time with a full cache
        outputs = llm.embed(PROMPTS, pooling=pooling, normalize=False)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            wanted = expected(folder, prompt, pooling)
            torch.testing.assert_close(torch.tensor(output.outputs.embedding), wanted, rtol=1e-4, atol=1e-4)
            assert output.prompt_token_ids == prompt


def test_a_last_state_uses_the_cache_and_a_mean_does_not(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    prompt = PROMPTS[-1]
    assert [o.num_cached_tokens for o in llm.embed([prompt], pooling="mean")] == [0]
    assert llm.embed([prompt], pooling="mean")[0].num_cached_tokens == 0
    assert llm.embed([prompt], pooling="last")[0].num_cached_tokens == 288
    assert llm.generate({"prompt_token_ids": prompt})[0].num_cached_tokens == 288, "what a mean computed is cached"


def test_vectors_survive_preemption_and_neighbours(make_llm: Callable[..., LLM]) -> None:
    alone = make_llm().embed(PROMPTS, pooling="mean")
    crowded = make_llm(num_gpu_blocks_override=34, max_num_batched_tokens=48, max_num_seqs=8)
    busy = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0)
    submissions = [crowded.engine.submission_of_ids(prompt, busy) for prompt in PROMPTS[:6]]
    with crowded.engine.submit(submissions) as batch:
        found = crowded.embed(PROMPTS, pooling="mean")
        batch.collect(lambda _: None)
    assert crowded.stats()["preemptions"] > 0
    for one, other in zip(alone, found, strict=True):
        assert one.outputs.embedding == pytest.approx(other.outputs.embedding, abs=1e-5)


def test_vectors_have_length_one_and_dimensions_are_cut_first(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    (raw,) = llm.embed("a tart", normalize=False)
    for dimensions in (None, 1, 7, 48):
        (output,) = llm.embed("a tart", dimensions=dimensions)
        vector = output.outputs.embedding
        assert len(vector) == (dimensions or 48) == output.outputs.hidden_size
        assert math.fsum(x * x for x in vector) == pytest.approx(1)
        assert vector == finish(raw.outputs.embedding, dimensions, True)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("dimensions", {"dimensions": 0}),
        ("dimensions", {"dimensions": 49}),
        ("pooling", {"pooling": "cls"}),
        ("prompt_token_ids", {"prompts": [[320]]}),
        ("prompts", {"prompts": []}),
    ],
)
def test_what_is_wrong_is_named(make_llm: Callable[..., LLM], name: str, change: dict[str, object]) -> None:
    with pytest.raises(ParameterError, match=name):
        make_llm().embed(**{"prompts": "a", **change})  # type: ignore[arg-type]


def test_the_model_says_how_it_is_pooled(tmp_path: Path) -> None:
    assert model_pooling(tmp_path) == "last"
    (tmp_path / "1_Pooling").mkdir()
    config = tmp_path / "1_Pooling" / "config.json"
    config.write_text(
        '{"word_embedding_dimension": 48, "pooling_mode_mean_tokens": true, "pooling_mode_cls_token": false}'
    )
    assert model_pooling(tmp_path) == "mean"
    config.write_text('{"pooling_mode_lasttoken": true}')
    assert model_pooling(tmp_path) == "last"
    config.write_text('{"pooling_mode_cls_token": true}')
    with pytest.raises(ParameterError, match="pooling_mode_cls_token"):
        model_pooling(tmp_path)
