"""The real files of the built-in models: octavo's log-probabilities, perplexity and text are transformers' on the same weights.

The short form compares with what transformers said once (`golden.py`), the long one runs transformers beside it on real
conversations.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from benches.data import sharegpt

from octavo import LLM, SamplingParams
from octavo.config import EngineConfig
from octavo.models.catalog import BUILT_IN
from octavo.quality.measures import EXACT_LOGPROB, MEAN_DIVERGENCE, PERPLEXITY, SAME_BEST
from octavo.quality.report import Check
from octavo.quality.texts import sample_text
from octavo.quality.verify import verify
from tests.quality.golden import ANSWER, MODELS, PROMPT, load_golden

STORY = 40
PATHS = {"exact": {"backend": "reference", "dtype": "float32"}, "cpu": {"backend": "cpu"}}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def golden(model: str) -> dict[str, Any]:
    found = load_golden(model)
    assert found["sha256"] == BUILT_IN[model].sha256, "made of another file: run python -m tests.quality.golden"
    return found


@pytest.fixture(scope="module", params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def llm(model: str, path: str) -> Any:
    settings = {"max_model_len": 256, "max_num_batched_tokens": 128, "disable_log_stats": True}
    with LLM(model, **settings, **PATHS[path]) as llm:
        yield llm


@pytest.fixture(scope="module")
def scored(llm: LLM, golden: dict[str, Any]) -> list[dict[int, float]]:
    """Per position, the log-probabilities of the text's own token and of the likeliest."""
    ids = golden["token_ids"]
    assert llm.get_tokenizer().encode(sample_text(), True)[: len(ids)] == ids
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    positions = llm.generate([ids], params, use_tqdm=False)[0].prompt_logprobs
    assert positions is not None
    return [{token: entry.logprob for token, entry in position.items()} for position in positions[1:] if position]


def test_log_probabilities_of_a_text_are_transformers(
    scored: list[dict[int, float]], golden: dict[str, Any], path: str
) -> None:
    own = np.array([position[token] for position, token in zip(scored, golden["token_ids"][1:], strict=True)])
    difference = np.abs(own - np.array(golden["logprobs"]))
    if path == "exact":
        assert difference.max() < EXACT_LOGPROB
    likeliest = [max(position, key=position.__getitem__) for position in scored]
    same = np.mean(np.array(likeliest) == np.array(golden["likeliest"]))
    assert same >= (0.99 if path == "exact" else SAME_BEST)


def test_perplexity_is_within_one_percent_of_transformers(
    scored: list[dict[int, float]], golden: dict[str, Any]
) -> None:
    own = [position[token] for position, token in zip(scored, golden["token_ids"][1:], strict=True)]
    ours, theirs = math.exp(-np.mean(own)), math.exp(-np.mean(golden["logprobs"]))
    assert 5 < theirs < 80  # a text that the model understands
    assert ours / theirs == pytest.approx(1.0, abs=PERPLEXITY)


def test_a_fact_is_completed_with_transformers_words(llm: LLM, golden: dict[str, Any], path: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, skip_special_tokens=False, ignore_eos=True)
    output = llm.generate(PROMPT, params, use_tqdm=False)[0]
    answer = output.outputs[0]
    assert output.prompt_token_ids == golden["prompt_ids"]
    assert answer.text.startswith(" Paris.")
    if path == "exact":
        assert answer.token_ids == golden["answer_ids"]


def test_a_greedy_story_is_english_and_no_loop(llm: LLM, path: str) -> None:
    if path == "exact":
        pytest.skip("its answer is compared token for token above; forty tokens more take a minute")
    params = SamplingParams(temperature=0.0, max_tokens=STORY, skip_special_tokens=False, ignore_eos=True)
    prompt = "The ship left the harbour at dawn. The captain looked at the clouds and"
    answer = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    fours = Counter(tuple(answer.token_ids[i : i + 4]) for i in range(STORY - 3))
    assert max(fours.values()) <= 3, answer.text
    assert len(answer.text.split()) >= 20
    assert all(character.isascii() for character in answer.text if character.isalpha()), answer.text
    assert "\ufffd" not in answer.text
    assert "<unk>" not in answer.text


def conversations() -> str:
    """About 20,000 characters of answers that people were given."""
    return "\n\n".join(turns[0][1] for turns in sharegpt(24, seed=5))[:20_000]


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_thousands_of_tokens_of_conversations_agree_with_transformers_beside(model: str) -> None:
    report = verify(EngineConfig(model=model), 3000, conversations())
    assert report.verdict == "ok", report.checks
    assert report.tokens >= 2990
    checks = {(check.part, check.what): check for check in report.checks}
    assert len(checks) == 6
    assert_limits(checks)


def assert_limits(checks: dict[tuple[str, str], Check]) -> None:
    """What the verdict says, from the numbers themselves."""
    running = "as it runs (cpu)"
    values = {key: check.value for key, check in checks.items() if check.value is not None}
    assert values["exact path", "largest |Δ log-probability|"] < EXACT_LOGPROB
    assert values[running, "mean divergence, nats"] < MEAN_DIVERGENCE
    assert values[running, "same likeliest token"] > SAME_BEST
    for part in ("exact path", running):
        assert abs(values[part, "perplexity"]) < PERPLEXITY
