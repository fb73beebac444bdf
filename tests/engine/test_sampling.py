"""Sampling through the whole engine: seeds, penalties, bias, choices, defaults, beams."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.errors import InvalidRequestError, ParameterError

PROMPT = [(i * 31) % 300 + 10 for i in range(30)]
OTHERS = [[(i * j) % 300 + 10 for i in range(5, 5 + 3 * j)] for j in range(2, 18)]


def ids(llm: LLM, prompt: list[int], params: SamplingParams) -> list[int]:
    return llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids


def first_logprobs(llm: LLM, prompt: list[int], **kwargs: Any) -> dict[int, float]:
    params = SamplingParams(max_tokens=1, logprobs=20, temperature=0, **kwargs)
    entries = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].logprobs[0]
    return {token: entry.logprob for token, entry in entries.items()}


def test_a_seeded_request_does_not_see_its_neighbours(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    seeded = SamplingParams(seed=42, temperature=0.8, max_tokens=16, ignore_eos=True)
    alone = ids(llm, PROMPT, seeded)
    for others in (
        [SamplingParams(temperature=1.0, max_tokens=20) for _ in range(8)],
        [SamplingParams(temperature=1.0, max_tokens=20, seed=i) for i in range(8)],
    ):
        for place in (0, 4, 8):
            prompts, params = OTHERS[:8], list(others)
            prompts = [*prompts[:place], PROMPT, *prompts[place:]]
            params.insert(place, seeded)
            assert llm.generate(prompts, params, use_tqdm=False)[place].outputs[0].token_ids == alone


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "settings", [{}, {"max_num_batched_tokens": 16}, {"max_num_batched_tokens": 64}, {"max_in_flight": 3}]
)
def test_tokens_do_not_depend_on_batch_cache_or_chunks(
    make_llm: Callable[..., LLM], settings: dict[str, int], temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, seed=9, max_tokens=24, ignore_eos=True)
    expected = ids(make_llm(enable_prefix_caching=False), PROMPT, params)
    llm = make_llm(**settings)
    assert ids(llm, PROMPT, params) == expected
    assert ids(llm, PROMPT, params) == expected, "with its prefix cached"
    outputs = llm.generate([*OTHERS, PROMPT], params, use_tqdm=False)
    assert outputs[-1].outputs[0].token_ids == expected


def test_requests_without_a_seed_differ_and_two_engines_of_one_seed_agree(make_llm: Callable[..., LLM]) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)
    first, second = make_llm(seed=7), make_llm(seed=7)
    one, two = ids(first, PROMPT, params), ids(first, PROMPT, params)
    assert one != two
    assert [ids(second, PROMPT, params), ids(second, PROMPT, params)] == [one, two]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", math.nan),
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("top_p", 0),
        ("top_p", -1),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("presence_penalty", 3),
        ("n", 0),
        ("n", 100_000),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("seed", 1 << 70),
        ("stop_token_ids", [320]),
        ("logit_bias", {999_999: 5.0}),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", []),
    ],
)
def test_a_wrong_value_is_refused_by_name_and_the_next_request_works(
    make_llm: Callable[..., LLM], name: str, value: Any
) -> None:
    llm = make_llm()
    with pytest.raises(ParameterError) as caught:
        llm.generate([PROMPT], SamplingParams(**{name: value}), use_tqdm=False)
    assert caught.value.param == name
    assert name in str(caught.value)
    assert len(ids(llm, PROMPT, SamplingParams(max_tokens=2, ignore_eos=True))) == 2


@pytest.mark.parametrize(
    "edge",
    [
        {"temperature": 1e-8},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_p": 1e-6},
        {"temperature": 1.0, "min_p": 1.0},
        {"temperature": 0.0, "top_k": 1_000_000},
    ],
)
def test_edge_values_that_leave_one_token_equal_greedy(make_llm: Callable[..., LLM], edge: dict[str, float]) -> None:
    llm = make_llm()
    greedy = ids(llm, PROMPT, SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
    assert ids(llm, PROMPT, SamplingParams(seed=4, max_tokens=10, ignore_eos=True, **edge)) == greedy


@pytest.mark.parametrize("wild", [{"temperature": 1e6}, {"repetition_penalty": 1e-9}, {"temperature": 1e-4}])
def test_wild_values_give_tokens(make_llm: Callable[..., LLM], wild: dict[str, float]) -> None:
    assert len(ids(make_llm(), PROMPT, SamplingParams(max_tokens=10, ignore_eos=True, **wild))) == 10


@pytest.mark.parametrize("state", ["cold", "cached"])
def test_presence_counts_outputs_only_and_repetition_counts_the_prompt_too(
    make_llm: Callable[..., LLM], state: str
) -> None:
    llm = make_llm(logprobs_mode="processed")
    if state == "cached":
        llm.generate([PROMPT], SamplingParams(max_tokens=1), use_tqdm=False)
    plain = first_logprobs(llm, PROMPT)
    assert first_logprobs(llm, PROMPT, presence_penalty=2.0, frequency_penalty=2.0) == plain
    assert first_logprobs(llm, PROMPT, repetition_penalty=2.0) != plain


def test_penalties_are_the_same_after_preemption(make_llm: Callable[..., LLM]) -> None:
    params = [
        SamplingParams(
            max_tokens=60, ignore_eos=True, seed=i, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.2
        )
        for i in range(4)
    ]
    large = make_llm()
    expected = [ids(large, p, s) for p, s in zip(OTHERS, params, strict=False)]
    small = make_llm(num_gpu_blocks_override=1 + 10, max_model_len=160)
    outputs = small.generate(OTHERS[:4], params, use_tqdm=False)
    assert small.stats()["preemptions"] > 0
    assert [o.outputs[0].token_ids for o in outputs] == expected


def test_logit_bias_bans_and_forces_at_every_step(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    free = ids(llm, PROMPT, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    banned = free[0]
    assert banned not in ids(
        llm, PROMPT, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logit_bias={banned: -100})
    )
    assert ids(llm, PROMPT, SamplingParams(max_tokens=6, ignore_eos=True, logit_bias={77: 100})) == [77] * 6


def test_allowed_ids_are_the_only_ones_and_bad_words_never_appear(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    allowed = [30, 40, 50]
    assert set(ids(llm, PROMPT, SamplingParams(max_tokens=30, allowed_token_ids=allowed, seed=1))) <= set(allowed)
    params = SamplingParams(max_tokens=80, seed=1, ignore_eos=True, bad_words=["a", "th"], temperature=1.5)
    text = llm.generate(["that was a"], params, use_tqdm=False)[0].outputs[0].text
    assert "a" not in [llm.get_tokenizer().decode([t]) for t in llm.get_tokenizer().encode(text)]


def test_when_nothing_is_left_to_draw_the_request_is_refused_or_fails_alone(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    token = llm.get_tokenizer().encode("q", False, False)[0]
    with pytest.raises(InvalidRequestError):
        llm.generate([PROMPT], SamplingParams(allowed_token_ids=[token], bad_words=["q"], max_tokens=3), use_tqdm=False)
    assert len(ids(llm, PROMPT, SamplingParams(max_tokens=2, ignore_eos=True))) == 2


def test_choices_differ_are_reproducible_and_each_ends_by_itself(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    params = SamplingParams(n=3, seed=1, temperature=1.5, max_tokens=40)
    first, second = (llm.generate([PROMPT], params, use_tqdm=False)[0] for _ in range(2))
    texts = [choice.token_ids for choice in first.outputs]
    assert len({tuple(t) for t in texts}) == 3
    assert texts == [choice.token_ids for choice in second.outputs]
    assert [choice.index for choice in first.outputs] == [0, 1, 2]
    assert all(choice.finish_reason in ("stop", "length") for choice in first.outputs)
    streamed = list(llm.stream(PROMPT, params))[-1]
    assert [choice.token_ids for choice in streamed.outputs] == texts


@pytest.mark.parametrize("caching", [True, False])
def test_choices_share_the_prompts_blocks(make_llm: Callable[..., LLM], caching: bool) -> None:
    llm = make_llm(enable_prefix_caching=caching)
    prompt = [(i * 7) % 300 + 10 for i in range(64)]
    llm.generate([prompt], SamplingParams(n=4, max_tokens=4, seed=1, ignore_eos=True), use_tqdm=False)
    shared = make_llm(enable_prefix_caching=False)
    expected = shared.generate([prompt], SamplingParams(n=4, max_tokens=9, seed=1, ignore_eos=True), use_tqdm=False)
    found = llm.generate([prompt], SamplingParams(n=4, max_tokens=9, seed=1, ignore_eos=True), use_tqdm=False)
    assert [c.token_ids for c in found[0].outputs] == [c.token_ids for c in expected[0].outputs]


def test_defaults_come_from_the_models_file_unless_the_request_or_a_flag_says_otherwise(
    make_llm: Callable[..., LLM], tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "defaults"
    shutil.copytree(tiny_model, folder)
    (folder / "generation_config.json").write_text(json.dumps({"top_k": 1, "temperature": 0.5, "eos_token_id": 1}))
    llm = make_llm(folder, disable_log_stats=False)
    assert "temperature=0.5, top_k=1 (generation_config.json)" in capfd.readouterr().err
    assert llm.get_default_sampling_params().top_k == 1
    greedy = ids(llm, PROMPT, SamplingParams(temperature=0, max_tokens=16))
    assert llm.generate([PROMPT], use_tqdm=False)[0].outputs[0].token_ids == greedy
    assert make_llm(folder, generation_config="none").get_default_sampling_params() == SamplingParams()


@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0])
def test_beam_search_finds_what_transformers_finds(
    make_llm: Callable[..., LLM], tiny_model: Path, length_penalty: float
) -> None:
    prompt = [(i * 11) % 300 + 10 for i in range(200)]
    model = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            num_beams=2,
            max_new_tokens=10,
            do_sample=False,
            length_penalty=length_penalty,
            eos_token_id=None,
            pad_token_id=2,
        )[0].tolist()
    params = BeamSearchParams(beam_width=2, max_tokens=10, length_penalty=length_penalty, ignore_eos=True)
    found = make_llm().beam_search([prompt], params)[0].sequences
    assert found[0].tokens == expected
    assert len(found) == 2
    assert found[0].score >= found[1].score


def test_beam_search_honours_the_end_of_sequence(make_llm: Callable[..., LLM], tiny_model: Path) -> None:
    llm = make_llm()
    best = ids(llm, PROMPT, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))[0]
    params = BeamSearchParams(beam_width=2, max_tokens=8, stop_token_ids=[best], length_penalty=0.0)
    found = llm.beam_search([PROMPT], params)[0].sequences
    assert any(s.finish_reason == "stop" and s.tokens[-1] == best for s in found)
