"""SmolLM2-135M against transformers fp32 (golden file): exact ids on the reference, close log-probabilities on the CPU ops."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from paged import PagedModel

from octavo.models.loader import load_model
from octavo.ops.cpu import CpuOps
from octavo.ops.reference import ReferenceOps

CASES = json.loads((Path(__file__).parents[2] / "golden" / "smollm2-135m.json").read_text())["cases"]


@pytest.fixture(scope="module")
def reference(smollm2):
    return load_model(smollm2, ReferenceOps(), max_positions=512)


@pytest.fixture(scope="module")
def cpu(smollm2):
    return load_model(smollm2, CpuOps(), max_positions=512)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["prompt"][:20])
def test_the_reference_writes_the_golden_tokens(reference, case):
    golden = case["hf_fp32"]
    model = PagedModel(reference.decoder, num_blocks=64)
    prompt = case["prompt_ids"]
    assert model.greedy(prompt, len(golden["new_ids"]), reference.spec.eos_token_ids) == golden["new_ids"]
    logprobs = model.step([(model.sequence(), prompt)])[0].log_softmax(-1)
    ids, expected = [entry[0] for entry in golden["first_top5"]], [entry[2] for entry in golden["first_top5"]]
    assert logprobs.topk(5).indices.tolist() == ids
    assert logprobs[ids].tolist() == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["prompt"][:20])
def test_packed_weights_agree_wherever_the_golden_choice_is_clear(cpu, case):
    """Each step is teacher-forced. Activations of 8 bits move the log-probability of a likely token by 0.1 nat in the mean
    and, rarely, by more than 0.3: below a gap of 0.5 nat they may choose otherwise."""
    golden = case["hf_fp32"]
    model = PagedModel(cpu.decoder, num_blocks=64)
    prompt, new = case["prompt_ids"], golden["new_ids"]
    logits = model.step([(model.sequence(), prompt + new[:-1])], all_logits=True)[len(prompt) - 1 :]
    chosen = logits.argmax(-1).tolist()
    for index, gap in enumerate(golden["top1_top2_gap_per_step"]):
        if gap > 0.5:
            assert chosen[index] == new[index], f"step {index}, gap {gap}"
    for token, _, expected in golden["first_top5"]:
        assert logits[0].log_softmax(-1)[token].item() == pytest.approx(expected, abs=0.5)


def test_packed_weights_stay_close_to_the_reference(reference, cpu):
    """Activations rounded to 8 bits and a bf16 cache cost little in every position of a real text, however it is cut in steps."""
    tokens = CASES[0]["prompt_ids"] + CASES[0]["hf_fp32"]["new_ids"] + CASES[1]["prompt_ids"] * 3
    tokens = tokens[:80]
    exact = PagedModel(reference.decoder, num_blocks=64)
    expected = exact.prefill(exact.sequence(), tokens, 80).log_softmax(-1)
    for chunk in (16, 80):
        packed = PagedModel(cpu.decoder, num_blocks=64)
        result = packed.prefill(packed.sequence(), tokens, chunk).log_softmax(-1)
        divergence = (expected.exp() * (expected - result)).sum(-1)
        assert divergence.mean() < 0.01
        assert torch.all(divergence < 0.2)
