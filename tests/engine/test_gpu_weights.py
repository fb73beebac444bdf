"""SmolLM2's weights on a CUDA device: the tokens and scores of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def load(path: Path, **settings: Any) -> LLM:
    return LLM(str(path), **{"backend": "cuda", "disable_log_stats": True, "max_model_len": 1024, **settings})


def answers(llm: LLM, cases: list[dict[str, Any]], **options: Any) -> list[Any]:
    params = [SamplingParams(temperature=0, max_tokens=len(c["hf_fp32"]["new_ids"]), **options) for c in cases]
    return [output.outputs[0] for output in llm.generate([c["prompt"] for c in cases], params, use_tqdm=False)]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_in_flight": 1},
        {"max_in_flight": 2},
        {"max_num_batched_tokens": 16, "enable_prefix_caching": False},
        {"num_gpu_blocks_override": 1 + 20, "max_model_len": 256},
    ],
    ids=["one step in flight", "two", "chunks", "preempted"],
)
def test_fp32_gives_transformers_tokens(smollm2_path: Path, golden: dict[str, Any], settings: dict[str, Any]) -> None:
    with load(smollm2_path, dtype="float32", **settings) as llm:
        for case, answer in zip(golden["cases"], answers(llm, golden["cases"], logprobs=5), strict=True):
            assert answer.token_ids == case["hf_fp32"]["new_ids"], case["prompt"]
            for token, _, expected in case["hf_fp32"]["first_top5"]:
                assert answer.logprobs[0][token].logprob == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("settings", [{}, {"enforce_eager": True}, {"deterministic": True}], ids=str)
def test_bf16_scores_transformers_tokens_as_transformers_does(
    smollm2_path: Path, golden: dict[str, Any], settings: dict[str, Any]
) -> None:
    with load(smollm2_path, **settings) as llm:
        for case, answer in zip(golden["cases"], answers(llm, golden["cases"], logprobs=5), strict=True):
            # bf16 has 8 bits: on logits of 20 that is 0.08 a rounding.
            for token, _, expected in case["hf_fp32"]["first_top5"][:2]:
                assert answer.logprobs[0][token].logprob == pytest.approx(expected, abs=0.25)
            gaps = case["hf_fp32"]["top1_top2_gap_per_step"]
            certain = next((i for i, gap in enumerate(gaps) if gap < 0.5), len(gaps))
            assert answer.token_ids[:certain] == case["hf_fp32"]["new_ids"][:certain]


def test_deterministic_tokens_do_not_depend_on_how_they_are_computed(
    smollm2_path: Path, golden: dict[str, Any]
) -> None:
    found = []
    for settings in ({}, {"enforce_eager": True}, {"max_num_batched_tokens": 48}, {"max_in_flight": 1}):
        with load(smollm2_path, deterministic=True, **settings) as llm:
            found.append([answer.token_ids for answer in answers(llm, golden["cases"])])
            alone = [answers(llm, [case])[0].token_ids for case in golden["cases"]]
        assert found[-1] == alone, settings
    assert all(tokens == found[0] for tokens in found)
