"""Log-probabilities of outputs and prompts: complete, aligned, the same whatever the engine did to compute them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from octavo import LLM, SamplingParams
from octavo.errors import ParameterError
from octavo.outputs import RequestOutput

PROMPT = [(i * 37) % 300 + 10 for i in range(100)]


def prompt_values(output: RequestOutput) -> list[float | None]:
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    return [
        None if entry is None else entry[token].logprob
        for token, entry in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    ]


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> torch.Tensor:
    """Log-probabilities of every position of PROMPT by transformers, `[100, V]`."""
    model = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)


def test_prompt_logprobs_equal_transformers_cold_and_cached_and_after_a_longer_prompt(
    make_llm: Callable[..., LLM], reference: torch.Tensor
) -> None:
    llm = make_llm()
    params = SamplingParams(prompt_logprobs=1, logprobs=1, max_tokens=1, temperature=0)
    expected = [None] + [reference[i, token].item() for i, token in enumerate(PROMPT[1:])]
    llm.generate([PROMPT[:80] + [33] * 60], SamplingParams(max_tokens=1), use_tqdm=False)
    for _ in range(3):
        output = llm.generate([PROMPT], params, use_tqdm=False)[0]
        values = prompt_values(output)
        assert values[0] is None
        assert values[1:] == pytest.approx(expected[1:], abs=1e-4)
        best = reference[-1].argmax().item()
        assert output.outputs[0].token_ids == [best]


@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
def test_prompt_logprobs_of_a_chunked_prompt_are_those_of_a_whole_one(
    make_llm: Callable[..., LLM], reference: torch.Tensor, chunk: int
) -> None:
    llm = make_llm(max_num_batched_tokens=chunk)
    output = llm.generate([PROMPT], SamplingParams(prompt_logprobs=3, max_tokens=2), use_tqdm=False)[0]
    values = prompt_values(output)
    assert values[1:] == pytest.approx([reference[i, t].item() for i, t in enumerate(PROMPT[1:])], abs=1e-4)
    for i, entry in enumerate(output.prompt_logprobs[1:]):
        likeliest = reference[i].topk(3).indices.tolist()
        assert sorted((t for t in entry if entry[t].rank <= 3), key=lambda t: entry[t].rank) == likeliest


def test_prompt_logprobs_survive_preemption(make_llm: Callable[..., LLM], reference: torch.Tensor) -> None:
    llm = make_llm(num_gpu_blocks_override=1 + 14, max_model_len=14 * 16, max_num_batched_tokens=32)
    params = SamplingParams(prompt_logprobs=0, max_tokens=40, ignore_eos=True, seed=1)
    outputs = llm.generate([PROMPT, [*PROMPT[:50], *PROMPT[:50]], PROMPT[::-1]], params, use_tqdm=False)
    assert llm.stats()["preemptions"] > 0
    expected = [reference[i, t].item() for i, t in enumerate(PROMPT[1:])]
    assert prompt_values(outputs[0])[1:] == pytest.approx(expected, abs=1e-4)
    assert all(len(prompt_values(o)) == 100 for o in outputs)


def test_masked_tokens_have_logprobs_that_json_can_carry(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(logprobs_mode="processed")
    output = llm.generate([PROMPT], SamplingParams(temperature=1, top_k=1, logprobs=5, max_tokens=3), use_tqdm=False)[0]
    values = [e.logprob for p in output.outputs[0].logprobs for e in p.values()]
    assert all(math.isfinite(v) for v in values)
    assert min(values) == -9999.0
    json.dumps(values, allow_nan=False)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("value", [60_000, 21, True, -1, 1.5])
def test_a_number_of_logprobs_that_cannot_be_is_refused_by_name(
    make_llm: Callable[..., LLM], name: str, value: Any
) -> None:
    llm = make_llm()
    with pytest.raises(ParameterError, match=name) as caught:
        llm.generate([PROMPT], SamplingParams(**{name: value}), use_tqdm=False)
    assert caught.value.param == name
    assert llm.generate([PROMPT], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)[0].finished


def test_raw_logprobs_do_not_depend_on_temperature_and_processed_ones_do(make_llm: Callable[..., LLM]) -> None:
    def first(llm: LLM, temperature: float) -> dict[int, float]:
        params = SamplingParams(temperature=temperature, logprobs=5, max_tokens=1, seed=3, ignore_eos=True)
        entries = llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].logprobs[0]
        return {token: entry.logprob for token, entry in list(entries.items())[-5:]}

    raw, processed = make_llm(), make_llm(logprobs_mode="processed")
    common = set(first(raw, 0.1)) & set(first(raw, 2.0))
    assert common
    assert all(first(raw, 0.1)[t] == first(raw, 2.0)[t] for t in common)
    common = set(first(processed, 0.1)) & set(first(processed, 2.0))
    assert any(abs(first(processed, 0.1)[t] - first(processed, 2.0)[t]) > 0.1 for t in common)


def test_the_bytes_of_the_tokens_join_to_the_text(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    ids = llm.get_tokenizer().encode("😀漢ďก", False, False)
    for token in ids:
        assert llm.get_tokenizer().token_bytes(token)
    prompt, seen = [20, 21], b""
    for token in ids:  # the text is forced token by token
        params = SamplingParams(allowed_token_ids=[token], max_tokens=1, logprobs=3)
        output = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]
        seen += output.logprobs[0][token].bytes
        prompt = [*prompt, token]
    assert seen.decode() == "😀漢ďก"


def test_cumulative_logprob_is_the_sum_over_the_sampled_tokens(make_llm: Callable[..., LLM]) -> None:
    output = (
        make_llm().generate([PROMPT], SamplingParams(logprobs=0, max_tokens=9, seed=2), use_tqdm=False)[0].outputs[0]
    )
    values = [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)]
    assert output.cumulative_logprob == pytest.approx(sum(values))
