"""Engines to test with: SmolLM2 on the exact path, and a tiny random Llama that runs a step in a millisecond or two."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from octavo import LLM

TINY_VOCAB = 320
EOS = 1


def make_tiny_model(folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """A random 2-layer Llama with a byte-level tokenizer: ids 0..2 are special, byte b is id 3 + b, the rest are words."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        **{
            "vocab_size": TINY_VOCAB,
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "bos_token_id": 0,
            "eos_token_id": EOS,
            "tie_word_embeddings": False,
            "initializer_range": 0.25,
            **overrides,
        }
    )
    LlamaForCausalLM(config).eval().save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<bos>": 0, "<eos>": EOS, "<pad>": 2}
    for symbol in alphabet:
        vocab[symbol] = len(vocab)
    pairs = itertools.product("aeiourstln", "abcdefghinorst")
    merges = [pair for _, pair in zip(range(TINY_VOCAB - len(vocab)), pairs, strict=False)]
    for pair in merges:
        vocab["".join(pair)] = len(vocab)
    assert len(vocab) == TINY_VOCAB
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>", "<pad>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}')
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny random Llama."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def make_llm(tiny_model: Path) -> Iterator[Callable[..., LLM]]:
    """Makes engines on the exact path, shut down after the test; each must leave the control plane whole and empty."""
    made: list[LLM] = []

    def make(model: str | Path | None = None, **kwargs: Any) -> LLM:
        settings = {"backend": "reference", "dtype": "float32", "disable_log_stats": True, **kwargs}
        made.append(LLM(str(model or tiny_model), **settings))
        return made[-1]

    yield make
    for llm in made:
        if not llm.engine.core.is_shut_down():
            assert_released(llm)
        llm.shutdown()


def assert_released(llm: LLM) -> None:
    """Every reference is gone: with the prefix cache forgotten, all blocks are free."""
    core = llm.engine.core
    # Aborts are applied by the next `schedule`, and none comes during a pause.
    for _ in range(10_000):
        if not llm.stats()["num_running"] and not llm.stats()["num_waiting"]:
            break
        time.sleep(0.001)
    core.pause()
    try:
        core.check_integrity()
        core.reset_prefix_cache()
        stats = llm.stats()
        assert stats["num_running"] == 0
        assert stats["num_waiting"] == 0
        assert stats["free_blocks"] == stats["num_blocks"]
    finally:
        core.resume()
