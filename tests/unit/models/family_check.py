"""What every family has to show: the logits of transformers' model of a small random checkpoint, however a sequence is computed."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from paged import PagedModel

from octavo.models.catalog import ModelSource
from octavo.models.decoder import Decoder
from octavo.models.loader import load_model
from octavo.ops.cpu import CpuOps
from octavo.ops.reference import ReferenceOps

VOCAB = 320
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}
OPS = {"reference": ReferenceOps, "cpu": lambda: CpuOps(torch.float32)}
if torch.cuda.is_available():
    from octavo.ops.cuda import CudaOps

    OPS["cuda"] = lambda: CudaOps("cuda", torch.float32)
TOLERANCE = {"atol": 1e-4, "rtol": 0}


def small(config_class: type, **changes: Any) -> Any:
    """A configuration of transformers of a size that runs in milliseconds."""
    return config_class(**{**SMALL, **changes})


def random_model(config: Any, seed: int = 7) -> Any:
    """A model whose norms and biases are random too; they are constants by default."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.5, 0.5))
            elif name.endswith("bias"):
                parameter.normal_(std=0.3)
    return model


def tokens_of(seed: int, count: int) -> list[int]:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def logits_of(oracle: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return oracle(torch.tensor([tokens])).logits[0]


def check_whole_and_in_chunks(decoder: Decoder, oracle: Any, chunk: int, tolerance: dict[str, float]) -> None:
    """Prefill, at once or in chunks, then 20 decode steps."""
    tokens = tokens_of(1, 110)
    expected = logits_of(oracle, tokens)
    assert expected.std() > 0.05, "the oracle's logits say nothing"
    model = PagedModel(decoder)
    sequence = model.sequence()
    torch.testing.assert_close(model.prefill(sequence, tokens[:90], chunk), expected[:90], **tolerance)
    for position in range(90, 110):
        step = model.step([(sequence, [tokens[position]])])[0]
        torch.testing.assert_close(step, expected[position], **tolerance)


def check_shared_prefix(decoder: Decoder, oracle: Any, tolerance: dict[str, float]) -> None:
    """A sequence on top of another one's blocks, in a step with others."""
    model = PagedModel(decoder, seed=3)
    first, second = tokens_of(1, 48), tokens_of(1, 48)[:32] + tokens_of(9, 60)
    owner = model.sequence()
    model.reserve(owner, 3)
    model.step([(owner, first[:40])])
    reader = model.sequence(owner, shared_blocks=2)
    logits = model.step([(owner, first[40:]), (reader, second[32:60])], padding=2)
    torch.testing.assert_close(logits[0], logits_of(oracle, first)[-1], **tolerance)
    torch.testing.assert_close(logits[1], logits_of(oracle, second[:60])[-1], **tolerance)
    logits = model.step([(owner, [5]), (reader, second[60:])])
    torch.testing.assert_close(logits[0], logits_of(oracle, [*first, 5])[-1], **tolerance)
    torch.testing.assert_close(logits[1], logits_of(oracle, second)[-1], **tolerance)


class CheckFamily:
    """Base of a family's test class; `variants` are its configurations by name."""

    variants: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(scope="class")
    @classmethod
    def checkpoint(cls, variant, tmp_path_factory):
        config = cls.variants[variant]
        oracle = random_model(config)
        folder = tmp_path_factory.mktemp(variant)
        oracle.save_pretrained(folder)
        return folder, oracle

    @pytest.fixture(
        scope="class", params=[pytest.param(name, marks=pytest.mark.gpu if name == "cuda" else ()) for name in OPS]
    )
    @classmethod
    def pair(cls, request, checkpoint):
        folder, oracle = checkpoint
        return load_model(ModelSource("test", folder), OPS[request.param]()).decoder, oracle

    @pytest.mark.parametrize("chunk", [90, 37, 16])
    def test_prefill_and_twenty_decode_steps_give_transformers_logits(self, pair, chunk):
        check_whole_and_in_chunks(*pair, chunk, TOLERANCE)

    def test_a_cached_prefix_changes_nothing(self, pair):
        check_shared_prefix(*pair, TOLERANCE)
