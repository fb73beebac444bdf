"""fp32 logits of the decoder against transformers' Llama: prefill, chunks, scattered and shared blocks, decode."""

from __future__ import annotations

import pytest
import torch
from paged import PagedModel

from octavo.models.catalog import ModelSource
from octavo.models.loader import load_model
from octavo.ops.cpu import CpuOps
from octavo.ops.reference import ReferenceOps

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
VARIANTS = {
    "grouped_query": {},
    "multi_head": {"num_key_value_heads": 4},
    "one_kv_head": {"num_key_value_heads": 1},
    "llama3_rope": {"rope_parameters": LLAMA3},
    "linear_rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}},
    "yarn_rope": {"rope_parameters": YARN},
    "large_theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "tied": {"tie_word_embeddings": True},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "head_dim_override": {"head_dim": 32},
}


OPS = {"reference": ReferenceOps, "cpu": lambda: CpuOps(torch.float32)}


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(request, make_llama):
    return make_llama(**VARIANTS[request.param])


@pytest.fixture(scope="module", params=OPS)
def pair(request, checkpoint):
    folder, oracle = checkpoint
    return load_model(ModelSource("test", folder), OPS[request.param]()).decoder, oracle


def tokens_of(seed: int, count: int) -> list[int]:
    return torch.randint(0, 384, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def logits_of(oracle, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return oracle(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("chunk", [150, 33, 16])
def test_prefill_in_chunks_then_twenty_decode_steps_give_the_same_logits(pair, chunk):
    decoder, oracle = pair
    tokens = tokens_of(1, 170)
    expected = logits_of(oracle, tokens)
    model = PagedModel(decoder)
    sequence = model.sequence()
    torch.testing.assert_close(model.prefill(sequence, tokens[:150], chunk), expected[:150], atol=1e-4, rtol=0)
    for position in range(150, 170):
        step = model.step([(sequence, [tokens[position]])])[0]
        torch.testing.assert_close(step, expected[position], atol=1e-4, rtol=0)


def test_a_mixed_step_of_decodes_prefills_and_padding_gives_each_row_its_own_logits(pair):
    decoder, oracle = pair
    model = PagedModel(decoder, seed=3)
    prompts = [tokens_of(seed, length) for seed, length in ((1, 17), (2, 140), (3, 1), (4, 40))]
    sequences = [model.sequence() for _ in prompts]
    model.step([(sequences[0], prompts[0][:-1]), (sequences[1], prompts[1][:-1])])
    logits = model.step(
        [
            (sequences[0], prompts[0][-1:]),
            (sequences[1], prompts[1][-1:]),
            (sequences[2], prompts[2]),
            (sequences[3], prompts[3]),
        ],
        padding=3,
    )
    for row, prompt in enumerate(prompts):
        torch.testing.assert_close(logits[row], logits_of(oracle, prompt)[-1], atol=1e-4, rtol=0)


def test_a_row_reads_blocks_that_another_row_of_the_same_step_fills(pair):
    decoder, oracle = pair
    model = PagedModel(decoder, seed=5)
    first, second = tokens_of(1, 48), tokens_of(1, 48)[:32] + tokens_of(9, 20)
    owner = model.sequence()
    model.reserve(owner, 3)
    reader = model.sequence(owner, shared_blocks=2)
    logits = model.step([(reader, second[32:]), (owner, first)])
    torch.testing.assert_close(logits[0], logits_of(oracle, second)[-1], atol=1e-4, rtol=0)
    torch.testing.assert_close(logits[1], logits_of(oracle, first)[-1], atol=1e-4, rtol=0)


def test_what_a_former_owner_left_in_a_block_changes_nothing(pair):
    decoder, oracle = pair
    model = PagedModel(decoder)
    former = model.sequence()
    norm = decoder._layers[0].attention_norm
    healthy = norm.clone()
    norm.fill_(float("nan"))
    assert model.step([(former, tokens_of(8, 100))]).isnan().all()
    norm.copy_(healthy)
    model.free.extend(former.tables[0].values())
    tokens = tokens_of(4, 21)
    logits = model.step([(model.sequence(), tokens)], padding=1)
    torch.testing.assert_close(logits[0], logits_of(oracle, tokens)[-1], atol=1e-4, rtol=0)
