"""What the metadata of a GGUF file may say: keys that change the computation count or are refused, and no value crashes."""

from __future__ import annotations

import pytest
from family_check import random_model, small
from gguf_files import write_gguf
from transformers import Gemma3TextConfig, LlamaConfig, Olmo2Config

from octavo.errors import ModelError
from octavo.models import loader
from octavo.models.catalog import ModelSource

CONFIGS = {
    "llama": small(LlamaConfig),
    "gemma3": small(Gemma3TextConfig, num_hidden_layers=6, head_dim=16, sliding_window=20, tie_word_embeddings=True),
    "olmo2": small(Olmo2Config),
}
NUMBERS = (None, True, -1, 0, 1, 3, 2**31, 2**63, -(2**63), -1.5, 0.5, 1e308, float("nan"), float("inf"))
HOSTILE = (*NUMBERS, "", "x" * 100_000, [], [1] * 6, [-1] * 6, [True] * 6, ["x"] * 6, [1, 2], [[1]], [float("nan")] * 6)
KEYS = (
    "embedding_length",
    "block_count",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "feed_forward_length",
    "context_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
)


@pytest.fixture(scope="module", params=CONFIGS)
def file(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("metadata") / "model.gguf"
    write_gguf(path, random_model(CONFIGS[request.param]), request.param)
    return request.param, loader.GgufFile(path)


@pytest.fixture
def open_with(file, monkeypatch):
    """Opens the file as if its metadata had other values."""
    architecture, gguf = file

    class Changed:
        path = gguf.path
        tensors = gguf.tensors

        def __init__(self, _path):
            self.metadata = gguf.metadata | changes

    changes = {}
    monkeypatch.setattr(loader, "GgufFile", Changed)

    def open_model(**values):
        changes.clear()
        changes.update({f"{architecture}.{key}": value for key, value in values.items()})
        return loader.open_model(ModelSource("test", gguf.path))

    return architecture, open_model


@pytest.mark.parametrize("key", KEYS)
def test_a_hostile_value_of_any_key_opens_or_is_an_error_of_one_line_that_names_the_file(open_with, key):
    _, open_model = open_with
    for scaling in ({}, {"rope.scaling.type": "yarn"}, {"rope.scaling.type": "longrope"}):
        for value in HOSTILE:
            try:
                spec = open_model(**scaling | {key: value}).spec
            except ModelError as error:
                message = str(error)
            else:
                frequencies = [f for layer in spec.layers for f in layer.attention.rope.inv_freq]
                assert all(0 < frequency < 1e30 for frequency in frequencies)
                continue
            assert "model.gguf" in message
            assert len(message) < 600


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.causal", False),
        ("attention.clamp_kqv", 8.0),
        ("attention.max_alibi_bias", 8.0),
        ("expert_gating_func", 2),
        ("expert_shared_count", 1),
        ("expert_weights_scale", 2.5),
        ("rope.scaling.yarn_ext_factor", 0.5),
    ],
)
def test_a_key_that_would_change_the_computation_is_refused_by_name(open_with, key, value):
    architecture, open_model = open_with
    with pytest.raises(ModelError, match=f"{architecture}.{key}={value} is not supported"):
        open_model(**{key: value})


def test_windows_count_where_the_family_has_them_and_are_refused_where_not(open_with):
    architecture, open_model = open_with
    pattern = [True, False, True, True, False, True]
    values = {"attention.sliding_window": 20, "attention.sliding_window_pattern": pattern}
    if architecture == "olmo2":
        with pytest.raises(ModelError, match="sliding_window=20 is not supported"):
            open_model(**values)
        return
    windows = [layer.attention.window for layer in open_model(**values).spec.layers]
    # Files of Llama have none, whatever they say: transformers and llama.cpp read no window either.
    expected = {"gemma3": [20 if local else None for local in pattern], "llama": [None] * 3}
    assert windows == expected[architecture]
