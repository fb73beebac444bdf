"""SmolLM2-135M on the exact path gives transformers' tokens, whatever the engine does around them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams

OTHERS = [f"Item {i}: the quick brown fox number {i * 7} jumps over" for i in range(16)]


def load(path: Path, **kwargs: Any) -> LLM:
    settings = {"backend": "reference", "dtype": "float32", "disable_log_stats": True, "max_model_len": 1024, **kwargs}
    return LLM(str(path), **settings)


def greedy(case: dict[str, Any], **kwargs: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=len(case["hf_fp32"]["new_ids"]), **kwargs)


def check(llm: LLM, golden: dict[str, Any]) -> None:
    cases = golden["cases"]
    outputs = llm.generate([c["prompt"] for c in cases], [greedy(c) for c in cases], use_tqdm=False)
    for case, output in zip(cases, outputs, strict=True):
        assert output.prompt_token_ids == case["prompt_ids"]
        assert output.outputs[0].token_ids == case["hf_fp32"]["new_ids"], case["prompt"]


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Any:
    with load(smollm2_path) as llm:
        yield llm


def test_each_case_alone_and_its_first_logprobs(llm: LLM, golden: dict[str, Any]) -> None:
    for case in golden["cases"]:
        output = llm.generate(case["prompt"], greedy(case, logprobs=5), use_tqdm=False)[0].outputs[0]
        assert output.token_ids == case["hf_fp32"]["new_ids"]
        assert output.logprobs is not None
        for token, _, expected in case["hf_fp32"]["first_top5"]:
            assert output.logprobs[0][token].logprob == pytest.approx(expected, abs=1e-3)


def test_the_text_is_transformers_text(llm: LLM, golden: dict[str, Any]) -> None:
    for case in golden["cases"]:
        output = llm.generate(case["prompt"], greedy(case, skip_special_tokens=False), use_tqdm=False)[0].outputs[0]
        expected = case["hf_fp32"]["text"]
        if output.finish_reason == "stop":  # the token that ended the text is not part of it
            expected = expected.removesuffix("<|im_end|>")
        assert output.text == expected


def test_in_a_batch_with_sixteen_others(llm: LLM, golden: dict[str, Any]) -> None:
    llm.reset_prefix_cache()
    cases = golden["cases"]
    params = [greedy(c) for c in cases] + [SamplingParams(max_tokens=20, seed=i) for i in range(len(OTHERS))]
    outputs = llm.generate([c["prompt"] for c in cases] + OTHERS, params, use_tqdm=False)
    for case, output in zip(cases, outputs, strict=False):
        assert output.outputs[0].token_ids == case["hf_fp32"]["new_ids"]


def test_with_a_cached_prefix(llm: LLM, golden: dict[str, Any]) -> None:
    check(llm, golden)
    for case in golden["cases"]:
        # A prompt that ends where the other began to answer, so that blocks of prompt and of output are hits.
        known = case["prompt_ids"] + case["hf_fp32"]["new_ids"][:20]
        output = llm.generate([known], greedy(case), use_tqdm=False)[0]
        rest = case["hf_fp32"]["new_ids"][20:]
        assert output.outputs[0].token_ids[: len(rest)] == rest
        assert output.num_cached_tokens == (len(known) - 1) // 16 * 16


# One token at a time is one step at a time: minutes, which the long tests have.
@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.slow), 7, 16, 17, 64])
def test_with_chunked_prefill(smollm2_path: Path, golden: dict[str, Any], chunk: int) -> None:
    with load(smollm2_path, max_num_batched_tokens=chunk, enable_prefix_caching=False) as llm:
        check(llm, golden)


@pytest.mark.parametrize("in_flight", [2, 3])
def test_with_steps_in_flight(smollm2_path: Path, golden: dict[str, Any], in_flight: int) -> None:
    with load(smollm2_path, max_in_flight=in_flight) as llm:
        check(llm, golden)


def test_after_preemption(smollm2_path: Path, golden: dict[str, Any]) -> None:
    longest = max(len(c["prompt_ids"]) + len(c["hf_fp32"]["new_ids"]) for c in golden["cases"])
    blocks = 2 * -(-longest // 16)
    with load(smollm2_path, num_gpu_blocks_override=blocks + 1, max_model_len=blocks * 16) as llm:
        cases = [*golden["cases"], golden["cases"][0]]
        outputs = llm.generate([c["prompt"] for c in cases], [greedy(c) for c in cases], use_tqdm=False)
        for case, output in zip(cases, outputs, strict=True):
            assert output.outputs[0].token_ids == case["hf_fp32"]["new_ids"]
        assert llm.stats()["preemptions"] > 0
