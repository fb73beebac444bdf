"""Shared prefixes: the right blocks, whatever is evicted, reset or reloaded meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import ParameterError
from tests.engine.conftest import make_tiny_model

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def trie_prompts(count: int, seed: int) -> list[list[int]]:
    """Prompts that share prefixes of many lengths."""
    numbers = random.Random(seed)
    prompts: list[list[int]] = [[]]
    while len(prompts) <= count:
        stem = numbers.choice(prompts)
        stem = stem[: numbers.randint(0, len(stem))]
        prompts.append(stem + [numbers.randrange(10, 310) for _ in range(numbers.randint(1, 40))])
    return [p[:200] for p in prompts[1:]]


@pytest.mark.parametrize("in_flight", [1, 2])
def test_no_prompt_ever_gets_another_prefixs_blocks_while_the_pool_evicts(
    make_llm: Callable[..., LLM], in_flight: int
) -> None:
    prompts = trie_prompts(200, seed=11)
    alone = make_llm(enable_prefix_caching=False)
    expected = [o.outputs[0].token_ids for o in alone.generate(prompts, PARAMS, use_tqdm=False)]
    llm = make_llm(num_gpu_blocks_override=1 + 60, max_num_seqs=8, max_model_len=300, max_in_flight=in_flight)
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    stats = llm.stats()
    assert stats["hit_tokens"] > 0
    assert [o.outputs[0].token_ids for o in outputs] == expected


def test_a_repeated_prompt_is_found_up_to_its_last_block(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    for length in (16, 17, 31, 32, 33, 100):
        prompt = [(i * 13 + length) % 300 + 10 for i in range(length)]
        llm.generate([prompt], PARAMS, use_tqdm=False)
        again = llm.generate([prompt], PARAMS, use_tqdm=False)[0]
        assert again.num_cached_tokens == (length - 1) // 16 * 16


def test_a_system_prompt_sent_by_many_at_once_is_computed_once(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    system = [(i * 17) % 300 + 10 for i in range(160)]
    outputs = llm.generate([[*system, 20 + i] for i in range(16)], PARAMS, use_tqdm=False)
    assert sorted(o.num_cached_tokens for o in outputs) == [0] + [160] * 15


def test_salts_keep_tenants_apart(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    prompt = [(i * 19) % 300 + 10 for i in range(64)]

    def cached(salt: str | None) -> int:
        return llm.generate([prompt], PARAMS, use_tqdm=False, cache_salt=salt)[0].num_cached_tokens

    assert [cached(None), cached("a"), cached("b"), cached("a"), cached(None)] == [0, 0, 0, 48, 48]


def test_reset_forgets_every_prefix(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    prompt = [(i * 23) % 300 + 10 for i in range(64)]
    llm.generate([prompt], PARAMS, use_tqdm=False)
    llm.reset_prefix_cache()
    assert llm.generate([prompt], PARAMS, use_tqdm=False)[0].num_cached_tokens == 0


def test_new_weights_forget_the_old_ones_prefixes(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    other_folder = make_tiny_model(tmp_path, seed=99)
    prompt = [(i * 29) % 300 + 10 for i in range(64)]
    expected = make_llm(other_folder).generate([prompt], PARAMS, use_tqdm=False)[0].outputs[0].token_ids
    llm = make_llm()
    before = llm.generate([prompt], PARAMS, use_tqdm=False)[0].outputs[0].token_ids
    llm.load_weights(str(other_folder))
    output = llm.generate([prompt], PARAMS, use_tqdm=False)[0]
    assert output.num_cached_tokens == 0
    assert output.outputs[0].token_ids == expected != before


def test_new_weights_of_another_shape_are_refused_and_the_old_go_on(
    make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    other = make_tiny_model(tmp_path, hidden_size=64)
    llm = make_llm()
    with pytest.raises(ParameterError, match="model"):
        llm.load_weights(str(other))
    assert llm.generate([[5, 6, 7]], PARAMS, use_tqdm=False)[0].finished
