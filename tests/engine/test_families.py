"""Families with windows, experts and long rotations in the whole engine, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig, Phi3Config, Qwen3MoeConfig

from octavo import LLM, SamplingParams
from octavo.models.catalog import ModelSource
from octavo.models.loader import open_model

SMALL = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 40, "tie_word_embeddings": True}
ORIGINAL = 128
CONFIGS = {
    "gemma2": Gemma2Config(**SMALL, **GEMMA, num_hidden_layers=2),
    "gemma3": Gemma3TextConfig(**SMALL, **GEMMA, num_hidden_layers=6),
    "qwen3_moe": Qwen3MoeConfig(
        **SMALL, num_hidden_layers=2, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "longrope": Phi3Config(
        **SMALL,
        num_hidden_layers=2,
        original_max_position_embeddings=ORIGINAL,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0 + 0.1 * i for i in range(6)],
            "long_factor": [1.5 + i for i in range(6)],
            "original_max_position_embeddings": ORIGINAL,
        },
    ),
}


@pytest.fixture(scope="session", params=CONFIGS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    return request.param, *save(CONFIGS[request.param], tmp_path_factory.mktemp(request.param))


def save(config: Any, folder: Path) -> tuple[Path, Any]:
    torch.manual_seed(11)
    oracle = AutoModelForCausalLM.from_config(config).eval()
    oracle.save_pretrained(folder)
    return folder, oracle


def prompt_of(seed: int, count: int) -> dict[str, list[int]]:
    ids = torch.randint(3, 320, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return {"prompt_token_ids": ids}


def scores(oracle: Any, tokens: list[int]) -> torch.Tensor:
    """Log-probability of each token after the first."""
    with torch.no_grad():
        logprobs = oracle(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def assert_scores(oracle: Any, outputs: list[Any], tolerance: float = 2e-4) -> None:
    """What the engine says of its own outputs is what transformers says of them."""
    for output in outputs:
        tokens, sampled = output.prompt_token_ids, output.outputs[0]
        expected = scores(oracle, tokens + sampled.token_ids)[len(tokens) - 1 :]
        given = [position[token].logprob for position, token in zip(sampled.logprobs, sampled.token_ids, strict=True)]
        torch.testing.assert_close(torch.tensor(given), expected, atol=tolerance, rtol=0)


def params(max_tokens: int = 24, **changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=0, **changes)


ENGINES: dict[str, dict[str, Any]] = {
    "reference": {},
    "cpu": {"backend": "cpu"},
    "small_steps": {"max_num_batched_tokens": 24, "max_num_seqs": 4},
    "two_in_flight": {"max_in_flight": 2, "max_num_batched_tokens": 64},
    "no_prefix_cache": {"enable_prefix_caching": False},
    "small_pool": {"num_gpu_blocks_override": 60, "max_model_len": 256, "max_num_batched_tokens": 32},
}


@pytest.mark.parametrize("engine", ENGINES)
def test_requests_of_all_lengths_at_once_get_the_models_own_scores(
    family: tuple[str, Path, Any], engine: str, make_llm: Callable[..., LLM]
) -> None:
    name, folder, oracle = family
    llm = make_llm(folder, skip_tokenizer_init=True, **ENGINES[engine])
    # None crosses LongRoPE's border: either whole prompts are beyond it, or no sequence is.
    lengths = (3, 17, 50, 70, 90, 101) if name != "longrope" else (3, 17, 50, 101, 130, 190)
    outputs = llm.generate([prompt_of(seed, length) for seed, length in enumerate(lengths)], params())
    assert_scores(oracle, outputs)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_prefix_is_a_hit_however_far_the_window_has_moved(
    family: tuple[str, Path, Any], backend: str, make_llm: Callable[..., LLM]
) -> None:
    name, folder, oracle = family
    llm = make_llm(folder, skip_tokenizer_init=True, backend=backend, max_num_batched_tokens=48)
    base = prompt_of(1, 160)["prompt_token_ids"]
    if name == "longrope":
        base = prompt_of(1, 80)["prompt_token_ids"]
    first = llm.generate([{"prompt_token_ids": base}], params())
    longer = [*base, *first[0].outputs[0].token_ids, 7, 8, 9]
    # The whole conversation, the same beginning with another end, and the prompt again.
    followers = [longer, [*base[:-20], 5, 6, 7], base]
    outputs = [llm.generate([{"prompt_token_ids": ids}], params(8))[0] for ids in followers]
    assert_scores(oracle, [*first, *outputs])
    assert outputs[0].num_cached_tokens >= len(base) // 16 * 16
    assert outputs[2].num_cached_tokens > 0 or CONFIGS[name].model_type.startswith("gemma")


def test_choices_of_one_prompt_share_it(family: tuple[str, Path, Any], make_llm: Callable[..., LLM]) -> None:
    _, folder, _ = family
    for caching in (True, False):
        llm = make_llm(folder, skip_tokenizer_init=True, enable_prefix_caching=caching)
        many = llm.generate([prompt_of(4, 77)], SamplingParams(n=3, seed=5, max_tokens=20, ignore_eos=True))[0]
        assert len({tuple(choice.token_ids) for choice in many.outputs}) == 3
        alone = llm.generate([prompt_of(4, 77)], SamplingParams(n=1, seed=5, max_tokens=20, ignore_eos=True))[0]
        assert many.outputs[0].token_ids == alone.outputs[0].token_ids


def test_short_and_long_rotations_share_no_prefix(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    folder, oracle = save(CONFIGS["longrope"], tmp_path)
    llm = make_llm(folder, skip_tokenizer_init=True)
    ids = prompt_of(3, 100)["prompt_token_ids"]
    short, long = [*ids, 4], [*ids, *prompt_of(5, 60)["prompt_token_ids"]]
    outputs = [llm.generate([{"prompt_token_ids": one}], params(8))[0] for one in (short, long, short, long)]
    assert_scores(oracle, outputs)
    assert [output.num_cached_tokens > 0 for output in outputs] == [False, False, True, True]


@pytest.mark.parametrize(("name", "blocks", "length"), [("longrope", 21, 150), ("gemma3", 13, 20)])
def test_reloaded_weights_work_in_an_engine_whose_memory_cut_the_context(
    name: str, blocks: int, length: int, make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    folder, oracle = save(CONFIGS[name], tmp_path)
    llm = make_llm(folder, skip_tokenizer_init=True, num_gpu_blocks_override=blocks)
    assert llm.engine.max_model_len < SMALL["max_position_embeddings"]
    llm.load_weights(str(folder))
    assert_scores(oracle, llm.generate([prompt_of(6, length)], params(8)))


def test_gemma3_at_8k_needs_less_than_30_percent_of_all_full_layers(
    make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    """The layers of Gemma 3 270M, which would need 18 * 512 blocks of one layer; a smaller model runs in seconds."""
    config = Gemma3TextConfig(
        **{**SMALL, "max_position_embeddings": 8192, "hidden_size": 16, "intermediate_size": 16},
        head_dim=4,
        num_hidden_layers=18,
        sliding_window=512,
        query_pre_attn_scalar=16,
        tie_word_embeddings=True,
    )
    folder, oracle = save(config, tmp_path)
    blocks_of_three_layers = int(0.3 * 18 / 3 * 8192 / 16)
    llm = make_llm(
        folder,
        skip_tokenizer_init=True,
        backend="cpu",
        num_gpu_blocks_override=blocks_of_three_layers + 1,
        max_num_batched_tokens=512,
    )
    assert llm.engine.max_model_len == 8192
    outputs = llm.generate([prompt_of(2, 8192 - 16)], params(16))
    assert_scores(oracle, outputs, tolerance=1e-3)


def test_a_window_as_long_as_the_context_needs_no_group_of_its_own(tmp_path: Path) -> None:
    from octavo.models.cache_groups import cache_groups

    folder, _ = save(CONFIGS["gemma3"], tmp_path)
    spec = open_model(ModelSource("test", folder)).spec
    assert [group.window for group in cache_groups(spec, 40)] == [None]
    assert [group.window for group in cache_groups(spec, 41)] == [None, *[40] * 5]
