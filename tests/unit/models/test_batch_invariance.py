"""The reference op set gives a token the same bits whatever else is in the step and however its prompt is cut."""

from __future__ import annotations

import pytest
import torch
from paged import PagedModel

from octavo.models.catalog import ModelSource
from octavo.models.loader import load_model
from octavo.ops.reference import ReferenceOps

SMALL = {
    "hidden_size": 72,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "intermediate_size": 200,
}
WIDE = {
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 5000,
}


def tokens_of(seed: int, count: int) -> list[int]:
    return torch.randint(0, 384, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module", params=["small", "wide"])
def decoder(request, make_llama):
    folder, _ = make_llama(**{"small": SMALL, "wide": WIDE}[request.param])
    return load_model(ModelSource("test", folder), ReferenceOps()).decoder


@pytest.fixture(scope="module")
def alone(decoder):
    """All logits of a 150-token prompt and of 5 decode steps, one row per step."""
    model = PagedModel(decoder)
    sequence = model.sequence()
    steps = [model.prefill(sequence, tokens_of(1, 150), 150)]
    steps += [model.step([(sequence, [token])]) for token in tokens_of(2, 5)]
    return torch.cat(steps)


@pytest.mark.parametrize("chunk", [1, 7, 16, 17, 64])
def test_logits_are_bitwise_equal_for_every_chunk_size(decoder, alone, chunk):
    model = PagedModel(decoder, seed=chunk)
    sequence = model.sequence()
    assert torch.equal(model.prefill(sequence, tokens_of(1, 150), chunk), alone[:150])
    for index, token in enumerate(tokens_of(2, 5)):
        assert torch.equal(model.step([(sequence, [token])])[0], alone[150 + index])


def test_logits_are_bitwise_equal_in_a_batch_of_seventeen(decoder, alone):
    model = PagedModel(decoder, seed=11)
    others = [model.sequence() for _ in range(16)]
    prompts = [tokens_of(20 + i, 1 + 9 * i) for i in range(16)]
    sequence = model.sequence()
    rows = list(zip(others, prompts, strict=True))
    logits = model.step([*rows[:9], (sequence, tokens_of(1, 150)), *rows[9:]], padding=2, all_logits=True)
    first = sum(len(prompt) for prompt in prompts[:9])
    assert torch.equal(logits[first : first + 150], alone[:150])
    for index, token in enumerate(tokens_of(2, 5)):
        rows = [(other, [7 * index]) for other in others]
        logits = model.step([*rows[:5], (sequence, [token]), *rows[5:]], padding=1)
        assert torch.equal(logits[5], alone[150 + index])


@pytest.mark.parametrize("block_size", [8, 32, 128])
def test_logits_are_bitwise_equal_for_every_block_size(decoder, alone, block_size):
    model = PagedModel(decoder, block_size=block_size, num_blocks=64, seed=2)
    assert torch.equal(model.prefill(model.sequence(), tokens_of(1, 150), 40), alone[:150])
