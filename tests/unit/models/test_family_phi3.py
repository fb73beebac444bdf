"""Phi-3 and Phi-4: fused weights, partial rotation, windows; LongRoPE has tests of its own below."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from family_check import OPS, TOLERANCE, CheckFamily, logits_of, random_model, small, tokens_of
from paged import PagedModel
from transformers import Phi3Config

from octavo.models.catalog import ModelSource
from octavo.models.loader import load_model


class TestPhi3(CheckFamily):
    variants: ClassVar = {
        "phi3_mini_4k": small(Phi3Config, sliding_window=31),
        "phi4_mini": small(
            Phi3Config,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
        ),
    }


ORIGINAL = 64


@pytest.fixture(scope="module")
def longrope(tmp_path_factory):
    """A model whose sequences beyond 64 tokens are rotated with other frequencies."""
    config = small(
        Phi3Config,
        original_max_position_embeddings=ORIGINAL,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0 + 0.1 * i for i in range(8)],
            "long_factor": [1.5 + i for i in range(8)],
            "original_max_position_embeddings": ORIGINAL,
        },
    )
    oracle = random_model(config)
    folder = tmp_path_factory.mktemp("longrope")
    oracle.save_pretrained(folder)
    return folder, oracle


@pytest.mark.parametrize("ops", OPS)
def test_sequences_beyond_the_original_length_use_the_long_frequencies(longrope, ops):
    folder, oracle = longrope
    decoder = load_model(ModelSource("test", folder), OPS[ops](), max_positions=256).decoder
    assert decoder.long_rope_above == ORIGINAL
    tokens = tokens_of(1, 100)
    for count, offset in ((60, 0), (100, decoder.max_positions)):
        model = PagedModel(decoder)
        batch = model.batch([(model.sequence(), tokens[:count])], all_logits=True)
        batch.positions += offset
        logits = decoder.forward(batch, model.cache).cpu()
        torch.testing.assert_close(logits, logits_of(oracle, tokens[:count]), **TOLERANCE)


def test_an_engine_for_short_sequences_needs_no_long_frequencies(longrope):
    folder, _ = longrope
    decoder = load_model(ModelSource("test", folder), OPS["reference"](), max_positions=ORIGINAL).decoder
    assert decoder.long_rope_above is None
